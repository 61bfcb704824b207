from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primus.data import readers
from primus.data.filter import whole_documents
from primus.data.filter.dedup import key_files, matches, stages
from primus.data.filter.dedup.job import DedupJob
from primus.data.filter.dedup.recipe import DedupRecipe
from primus.data.filter.dedup.report import DedupReport
from primus.data.filter.result_folder import JobResult, filter_documents
from primus.data.readers import shard
from primus.data.shards.workers import ShardProgress
from primus.errors import PrimusError, UsageError

VOCABULARY = [
    f"{one}{two}" for one in ("lu", "mar", "ten", "so", "quil", "ba", "dre") for two in ("ra", "vi", "co", "st")
]
KILLED = """
import os, random, signal, sys
from pathlib import Path
from primus.data.readers import shard
from primus.data.shards import shard_queue
from primus.data.filter.dedup import keys
from primus.data.filter.dedup.job import DedupJob
from primus.data.filter.result_folder import filter_documents
from primus.data.filter.dedup.recipe import DedupRecipe
from primus.data.shards.workers import ShardProgress

shard.SMALLEST_SHARD_BYTES = 30000
keys.compute_document_keys(["compiled once for all"], DedupRecipe())
left = 0

def deadly(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

def make(folder, kill_at):
    global left
    pid = os.fork()
    if pid == 0:
        if kill_at:
            left = kill_at
            for name in ("replace", "rename", "link", "unlink", "fsync", "mkdir", "rmdir"):
                setattr(os, name, deadly(getattr(os, name)))
            shard_queue.ShardOutput.add_counts = deadly(shard_queue.ShardOutput.add_counts)
        filter_documents(DedupJob(inputs=(sys.argv[1],), output=folder / "out", workers=1))
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def content(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

root, kills = Path(sys.argv[2]), 0
assert make(root / "whole", 0) == 0
choose = random.Random(3)
for number in range(3):
    folder = root / str(number)
    while make(folder, choose.randrange(1, 120)):
        assert not (folder / "out").exists() or content(folder / "out") == content(root / "whole" / "out")
        kills += 1
    assert make(folder, 0) == 0
    assert content(folder) == content(root / "whole"), sorted(content(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["out", "out.report.html", "out.report.md"]
print(kills)
"""


def original(number: int, count: int = 200) -> str:
    return " ".join(random.Random(number).choices(VOCABULARY, k=count))


def edited(text: str, rate: float, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(f"new{chance.random()}" if chance.random() < rate else word for word in text.split())


def write(path: Path, texts: list[str]) -> Path:
    records = [{"id": number, "text": text, "meta": {"n": [number]}} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def unique(given: Path | list[Path], output: Path, **settings: object) -> JobResult[DedupReport]:
    recipe = DedupRecipe(**{key: settings.pop(key) for key in list(settings) if key in DedupRecipe.__struct_fields__})  # type: ignore[arg-type]
    paths = given if isinstance(given, list) else [given]
    return filter_documents(
        DedupJob(inputs=tuple(map(str, paths)), output=output, recipe=recipe, **{"workers": 1, **settings})
    )  # type: ignore[arg-type]


def kept(done: JobResult[DedupReport]) -> list[int]:
    found = (
        each for file in done.files for each in readers.read_documents(file, options=readers.ReadOptions(fields=True))
    )
    return [each.fields["id"] for each in found if isinstance(each, readers.TextDocument) and each.fields]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    """100 documents, then 60 copies of the first of them: 20 with another case and spacing, 20 edited, 20 longer."""
    texts = [original(number) for number in range(100)]
    for number in range(20):
        texts.append(texts[number].upper().replace(" ", "\n"))
        texts.append(edited(texts[20 + number], 0.01, number))
        texts.append(f"{texts[40 + number]} {original(1000 + number, 8)}")
    return texts


def test_near_copies_are_removed_and_others_are_not(tmp_path: Path, corpus: list[str]) -> None:
    done = unique(write(tmp_path / "a.jsonl", corpus), tmp_path / "out")
    assert kept(done)[:100] == list(range(100))
    assert len(kept(done)) <= 102
    assert done.report.removed_near >= 58 and done.report.removed_exact == 0
    assert done.report.documents == 160 and done.report.kept == len(kept(done))
    assert done.report.sizes == [(2, done.report.clusters)]


def test_what_is_less_alike_than_the_threshold_stays(tmp_path: Path) -> None:
    texts = [original(number) for number in range(100)]
    texts += [edited(text, 0.2, number) for number, text in enumerate(texts)]
    done = unique(write(tmp_path / "a.jsonl", texts), tmp_path / "out")
    assert done.report.kept >= 195
    fine = unique(tmp_path / "a.jsonl", tmp_path / "fine", bands=60, rows=2)
    assert fine.report.kept < 130


def test_other_fields_are_kept_under_any_name_of_the_text(tmp_path: Path) -> None:
    lines = [{"id": 1, "body": "one two three", "lang": "en"}, {"id": 2, "body": "one two three", "lang": "en"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = unique(tmp_path / "a.jsonl", tmp_path / "out", json_key="body")
    [text] = [
        each
        for file in done.files
        for each in readers.read_documents(file, key="body", options=readers.ReadOptions(fields=True))
    ]
    assert isinstance(text, readers.TextDocument)
    assert (text.text, text.fields) == ("one two three", {"id": 1, "lang": "en"})


def test_the_exact_method_removes_equal_texts_only_unless_it_normalizes(tmp_path: Path, corpus: list[str]) -> None:
    lines = write(tmp_path / "a.jsonl", [*corpus, corpus[3], corpus[140], corpus[3]])
    done = unique(lines, tmp_path / "out", method="exact")
    assert kept(done) == list(range(160))
    assert (done.report.removed_exact, done.report.removed_near, done.report.threshold) == (3, 0, None)
    assert done.report.sizes == [(2, 1), (3, 1)]
    words = unique(lines, tmp_path / "words", method="exact", normalize=True)
    assert kept(words) == [number for number in range(160) if number < 100 or number % 3 != 1]


def test_exact_and_near_copies_are_counted_apart(tmp_path: Path) -> None:
    texts = [original(1), original(2), original(1).upper(), original(1), original(1).upper()]
    done = unique(write(tmp_path / "a.jsonl", texts), tmp_path / "out")
    assert kept(done) == [0, 1]
    assert (done.report.removed_exact, done.report.removed_near) == (2, 1)


def test_texts_without_words_are_copies_of_their_equals_only(tmp_path: Path) -> None:
    done = unique(write(tmp_path / "a.jsonl", ["!!!", "???", "!!!", " \n", "", "a", "A."]), tmp_path / "out")
    assert kept(done) == [0, 1, 5]
    assert done.report.empty == 2


def test_the_result_depends_on_neither_workers_nor_shards_nor_memory(
    tmp_path: Path, corpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list(corpus)
    random.Random(1).shuffle(texts)
    lines = [write(tmp_path / "a.jsonl", texts[:90]), tmp_path / "b.jsonl"]
    write(lines[1], texts[90:])
    whole = unique(lines, tmp_path / "whole")
    monkeypatch.setattr(shard, "SMALLEST_SHARD_BYTES", 9000)
    monkeypatch.setattr(key_files, "BLOCK_DOCUMENTS", 5)
    monkeypatch.setattr(matches, "MOST_HELD", 60)
    monkeypatch.setattr(stages, "NUMBERS_AT_A_TIME", 7)
    many = unique(lines, tmp_path / "many", workers=2)
    assert len(many.files) > 10
    assert kept(many) == kept(whole)
    assert [many.report.samples, many.report.sizes] == [whole.report.samples, whole.report.sizes]
    assert content(tmp_path / "many") == content(unique(lines, tmp_path / "one").folder)


def test_the_same_job_again_finds_it_done_and_another_one_is_refused(tmp_path: Path, corpus: list[str]) -> None:
    lines = write(tmp_path / "a.jsonl", corpus)
    before = unique(lines, tmp_path / "out")
    again = unique(lines, tmp_path / "out", workers=2)
    assert before.made and not again.made
    assert (again.files, again.report) == (before.files, before.report)
    with pytest.raises(UsageError, match="its ngram is 5"):
        unique(lines, tmp_path / "out", ngram=4)
    with pytest.raises(UsageError, match="other settings"):
        unique(lines, tmp_path / "out", text_documents="line")
    write(tmp_path / "a.jsonl", corpus[:9])
    with pytest.raises(UsageError, match="new, gone or changed"):
        unique(lines, tmp_path / "out")
    assert unique(lines, tmp_path / "out", existing="replace").report.documents == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out", "out.report.html", "out.report.md"]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, corpus: list[str]) -> None:
    lines = write(tmp_path / "a.jsonl", corpus[:3])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    for existing in ("check", "replace"):
        with pytest.raises(UsageError, match=DedupJob.report_name):
            unique(lines, tmp_path / "out", existing=existing)
    assert content(tmp_path / "out") == {"mine.txt": b"precious"}


def test_a_damaged_result_is_not_taken_for_done(tmp_path: Path, corpus: list[str]) -> None:
    lines = write(tmp_path / "a.jsonl", corpus[:3])
    done = unique(lines, tmp_path / "out")
    done.files[0].write_bytes(b"")
    with pytest.raises(UsageError, match="one of its files is missing or damaged"):
        unique(lines, tmp_path / "out")


def test_bad_lines_are_fatal_with_their_place_or_listed(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "good one"}\n{"text": nu\n{"text": null}\n{"text": "good two"}\n')
    with pytest.raises(PrimusError, match=r"a\.jsonl:2"):
        unique(lines, tmp_path / "out")
    with pytest.raises(PrimusError, match=r"a\.jsonl:3.*bad document 2 of at most 1"):
        unique(lines, tmp_path / "out", max_bad=1)
    assert not (tmp_path / "out").exists()
    done = unique(lines, tmp_path / "out", max_bad=2)
    assert done.report.kept == 2
    assert [item.where for item in done.report.bad] == [f"{lines}:2", f"{lines}:3"]


@pytest.mark.parametrize("later", [1, 2, 3])
def test_an_input_that_changes_between_two_readings_is_told(tmp_path: Path, later: int) -> None:
    lines = write(tmp_path / "a.jsonl", [original(number) for number in range(2)])
    changes = iter([later])

    def show(progress: ShardProgress) -> None:
        if progress.stage == "matching" and (count := next(changes, None)):
            write(lines, [original(number + 7) for number in range(count)])

    with pytest.raises(PrimusError, match=r"a\.jsonl: changed while it was read"):
        filter_documents(DedupJob(inputs=(str(lines),), output=tmp_path / "out", workers=1), show=show)
    assert not (tmp_path / "out").exists()


def test_a_long_text_file_is_one_document(
    tmp_path: Path, prose: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prose(60_000, 3)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text.upper())
    done = unique([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out")
    assert (done.report.documents, done.report.kept) == (2, 1)
    [kept_text] = [each for file in done.files for each in readers.read_documents(file)]
    assert isinstance(kept_text, readers.TextDocument) and kept_text.text == text
    monkeypatch.setattr(whole_documents, "LONGEST_DOCUMENT", len(text) - 1)
    with pytest.raises(PrimusError, match=r"a\.txt:1: a document of more than"):
        unique(tmp_path / "a.txt", tmp_path / "none")


def test_samples_show_both_sides_and_how_alike_they_are(tmp_path: Path, corpus: list[str]) -> None:
    lines = write(tmp_path / "a.jsonl", corpus)
    done = unique(lines, tmp_path / "out")
    samples = {sample.removed: sample for sample in done.report.samples}
    assert len(samples) == 20
    same = next(sample for sample in samples.values() if sample.removed_text.isupper())
    assert same.similarity == 1.0 and same.kept_text == same.removed_text.lower().replace("\n", " ")
    assert all(0.5 < sample.similarity <= 1 for sample in samples.values())
    page = (tmp_path / "out.report.md").read_text()
    assert same.kept in page and re.search(r"\| 2 +\| ", page)
    side_by_side = (tmp_path / "out.report.html").read_text()
    assert f"<th>Kept, {same.kept}</th><th>Removed</th>" in side_by_side


def test_a_named_dataset_is_deduplicated(tmp_path: Path) -> None:
    done = filter_documents(
        DedupJob(dataset="python-stdlib", output=tmp_path / "out", recipe=DedupRecipe(method="exact"), workers=1)
    )
    assert done.report.input_text == "dataset:python-stdlib"
    assert 0 < done.report.kept <= done.report.documents


def test_killed_at_any_moment_the_same_command_makes_the_same_bytes(tmp_path: Path, corpus: list[str]) -> None:
    lines = write(tmp_path / "a.jsonl", corpus)
    command = [sys.executable, "-c", KILLED, str(lines), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def write_texts(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def numbered_words(count: int) -> list[str]:
    """Different documents that differ in nothing but the digits of their words."""
    return [
        " ".join(f"w{random.Random(number).randrange(10**6)}x{place}" for place in range(40)) for number in range(count)
    ]


def test_a_corpus_that_collapses_to_one_document_is_warned_of(tmp_path: Path) -> None:
    said: list[str] = []
    job = DedupJob(
        inputs=(write_texts(tmp_path / "in.jsonl", numbered_words(400)),), output=tmp_path / "out", max_removed=1.0
    )
    done = filter_documents(job, said.append)
    assert done.report.kept == 1
    (cluster,) = done.report.large
    assert (cluster.documents, cluster.share, cluster.sample.similarity) == (400, 1.0, 1.0)
    assert cluster.similarity_with_numbers < 0.1
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "400 of 400 documents (100%) form one cluster" in warning
    assert "use --no-normalize-numbers to compare" in warning
    assert f"Kept, {tmp_path}/in.jsonl:1: 'w" in warning
    assert warning in (tmp_path / "out.report.md").read_text()
    again: list[str] = []
    filter_documents(job, again.append)
    assert warning in again


@pytest.mark.parametrize(
    ("copies", "others", "share", "is_refused"),
    [
        (30, 30, 0.5, False),  # 29 of 60
        (32, 28, 0.5, True),  # 31 of 60
        (31, 29, 0.5, False),  # 30 of 60 is the share itself
        (11, 1, 0.0, True),
        (10, 0, 0.0, False),  # too few to judge: 9
    ],
)
def test_more_near_duplicates_than_the_share_are_refused_before_a_document_is_written(
    tmp_path: Path, copies: int, others: int, share: float, is_refused: bool
) -> None:
    different = [" ".join(f"{word * (place + 2)}{word}" for word in "abcdefgh") for place in range(others)]
    texts = [*numbered_words(copies), *different]
    inputs = (write_texts(tmp_path / "in.jsonl", texts),)
    job = DedupJob(inputs=inputs, output=tmp_path / "out", max_removed=share, workers=1)
    if not is_refused:
        assert filter_documents(job).report.kept == 1 + others
        return
    with pytest.raises(PrimusError, match=f"{copies - 1} of {len(texts)} documents .* more than the share {share:g}"):
        filter_documents(job)
    assert not (tmp_path / "out").exists()
    again = filter_documents(dataclasses.replace(job, max_removed=1.0))
    assert (again.report.kept, again.report.removed_near) == (1 + others, copies - 1)


def test_equal_texts_do_not_count_as_near_duplicates(tmp_path: Path) -> None:
    inputs = (write_texts(tmp_path / "in.jsonl", ["the same words in every one of these documents"] * 40),)
    done = filter_documents(DedupJob(inputs=inputs, output=tmp_path / "out", max_removed=0.5, workers=1))
    assert (done.report.kept, done.report.removed_exact) == (1, 39)


def test_numbers_may_be_compared_as_they_are(tmp_path: Path) -> None:
    texts = [*numbered_words(50), *numbered_words(3)]
    job = DedupJob(
        inputs=(write_texts(tmp_path / "in.jsonl", texts),),
        output=tmp_path / "out",
        recipe=DedupRecipe(normalize_numbers=False),
    )
    report = filter_documents(job).report
    assert (report.kept, report.removed_exact, report.large) == (50, 3, [])


@pytest.mark.parametrize(("method", "copies"), [("exact", 30), ("minhash", 30), ("minhash", 5)])
def test_a_text_that_is_repeated_all_over_the_corpus_is_warned_of(tmp_path: Path, method: str, copies: int) -> None:
    numbers = random.Random(4)
    different = [" ".join(numbers.choices(VOCABULARY, k=60)) for _ in range(120)]
    texts = [*different, *["this page was not found on this server"] * copies]
    said: list[str] = []
    recipe = DedupRecipe(method=method)  # type: ignore[arg-type]
    job = DedupJob(inputs=(write_texts(tmp_path / "in.jsonl", texts),), output=tmp_path / "out", recipe=recipe)
    report = filter_documents(job, said.append).report
    warned = [line for line in said if line.startswith("warning")]
    assert [cluster.documents for cluster in report.large] == ([30] if copies == 30 else [])
    assert len(warned) == (copies == 30)
    assert all("30 of 150 documents (20%)" in line and "both texts are equal" in line for line in warned)

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from primus.data.filter.cleaning import job as jobs
from primus.data.filter.cleaning import recipe
from primus.data.filter.cleaning.job import CleanJob
from primus.data.filter.result_folder import filter_documents
from primus.data.readers import ReadOptions, read_documents, shard
from primus.errors import PrimusError, UsageError

DECISIONS = json.loads(Path(__file__).with_name("decisions.json").read_text())


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records in a dozen shards."""
    monkeypatch.setattr(shard, "choose_shard_size", lambda size: 1 << 14)
    file = tmp_path / "in.jsonl"
    texts = [each["text"] for each in DECISIONS] * 3
    file.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts)))
    return file


def job(corpus: Path, output: Path, **settings: Any) -> CleanJob:
    settings = {"recipe": recipe.load_recipe("gopher"), "workers": 0, **settings}
    return CleanJob(inputs=(str(corpus),), output=output, **settings)


def records(files: list[Path]) -> list[tuple[str, Any]]:
    return [
        (each.text, each.fields)
        for file in files
        for each in read_documents(file, options=ReadOptions(fields=True))
        if hasattr(each, "text")
    ]


def test_what_is_kept_has_its_fields_and_order_and_the_report_adds_up(corpus: Path, tmp_path: Path) -> None:
    said: list[str] = []
    done = filter_documents(job(corpus, tmp_path / "out", keep_removed=True), said.append)
    kept = records(done.files)
    expected = [
        each["decisions"]["gopher_repetition"] is True and each["decisions"]["gopher_quality"] is True
        for each in DECISIONS * 3
    ]
    assert [fields["id"] for _, fields in kept] == [number for number, keep in enumerate(expected) if keep]
    report = done.report
    assert (report.documents, report.kept) == (90, len(kept))
    assert sum(each.documents for each in report.removed) == 90 - len(kept)
    assert report.kept_characters == sum(len(text) for text, _ in kept)
    removed = records(sorted(jobs.removed_folder(tmp_path / "out").iterdir()))
    assert len(removed) == 90 - len(kept)
    why = removed[0][1]["removed_by"]
    number = removed[0][1]["id"]
    assert why["where"] == f"{corpus}:{number + 1}" and why["value"] != why["limit"]
    assert any("gopher_quality" in line for line in "\n".join(said).splitlines())


def test_samples_tell_why_and_from_where(corpus: Path, tmp_path: Path) -> None:
    done = filter_documents(job(corpus, tmp_path / "out"))
    lines = corpus.read_text().splitlines()
    by_rule = [sample.rule for sample in done.report.samples]
    assert {rule: by_rule.count(rule) for rule in by_rule} == {"gopher_repetition": 5, "gopher_quality": 5}
    for sample in done.report.samples:
        text = json.loads(lines[int(sample.where.rpartition(":")[2]) - 1])["text"]
        assert text.startswith(sample.text.partition(" ... (")[0])
    page = (tmp_path / "out.report.html").read_text()
    markdown = (tmp_path / "out.report.md").read_text()
    assert done.report.samples[0].where in page and done.report.samples[0].where in markdown
    assert "<svg" in page and "min_alphabetic_words" in page


def test_the_result_does_not_depend_on_workers_and_is_not_made_twice(corpus: Path, tmp_path: Path) -> None:
    one = filter_documents(job(corpus, tmp_path / "one"))
    two = filter_documents(job(corpus, tmp_path / "two", workers=2))
    assert one.report.files == two.report.files and len(one.files) > 2
    assert one.report.samples == two.report.samples
    assert [path.read_bytes() for path in one.files] == [path.read_bytes() for path in two.files]
    assert not filter_documents(job(corpus, tmp_path / "one")).made
    assert not list(tmp_path.glob(".*.work"))


def test_another_recipe_does_not_silently_take_the_place_of_a_result(corpus: Path, tmp_path: Path) -> None:
    filter_documents(job(corpus, tmp_path / "out"))
    other = recipe.load_recipe("tprimat")
    with pytest.raises(UsageError, match="differs: it was made by recipe gopher"):
        filter_documents(job(corpus, tmp_path / "out", recipe=other))
    assert filter_documents(job(corpus, tmp_path / "out", recipe=other, existing="replace")).report.recipe == "tprimat"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UsageError, match=r"it has no manifest\.json"):
        filter_documents(job(corpus, tmp_path / "mine", existing="replace"))


def test_a_damaged_result_is_not_taken_for_whole(corpus: Path, tmp_path: Path) -> None:
    done = filter_documents(job(corpus, tmp_path / "out"))
    os.truncate(done.files[0], 10)
    with pytest.raises(UsageError, match="one of its files is missing or damaged"):
        filter_documents(job(corpus, tmp_path / "out"))
    filter_documents(job(corpus, tmp_path / "both"))
    with pytest.raises(UsageError, match="other settings"):
        filter_documents(job(corpus, tmp_path / "both", keep_removed=True))
    filter_documents(job(corpus, tmp_path / "both", keep_removed=True, existing="replace"))
    next(jobs.removed_folder(tmp_path / "both").iterdir()).unlink()
    with pytest.raises(UsageError, match="one of its files is missing or damaged"):
        filter_documents(job(corpus, tmp_path / "both", keep_removed=True))


def test_what_was_done_of_an_input_that_has_changed_since_is_not_taken(corpus: Path, tmp_path: Path) -> None:
    whole = corpus.read_text()
    corpus.write_text(f"{whole[:-2]} \n")
    with pytest.raises(PrimusError, match="not JSON"):
        filter_documents(job(corpus, tmp_path / "out"))
    assert list((tmp_path / ".out.work").rglob("000000.json"))
    corpus.write_text(whole.replace(" small ", " SMALL "))
    assert " SMALL " in records(filter_documents(job(corpus, tmp_path / "out")).files)[0][0]


@pytest.mark.parametrize(("compression", "ending"), [("gz", ".jsonl.gz"), ("none", ".jsonl")])
def test_files_are_written_as_asked_for(corpus: Path, tmp_path: Path, compression: Any, ending: str) -> None:
    done = filter_documents(job(corpus, tmp_path / "out", compression=compression))
    assert {"".join(path.suffixes) for path in done.files} == {ending}
    content = gzip.decompress(done.files[0].read_bytes()) if compression == "gz" else done.files[0].read_bytes()
    assert json.loads(content.splitlines()[0])["text"]
    assert records(done.files) == records(filter_documents(job(corpus, tmp_path / "zst")).files)


def test_bad_and_empty_documents_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "   "}\n{"text": null}\n' + json.dumps({"text": DECISIONS[0]["text"]}) + "\n")
    with pytest.raises(PrimusError, match=r"in.jsonl:2: field 'text' is null"):
        filter_documents(job(file, tmp_path / "out"))
    report = filter_documents(job(file, tmp_path / "out", max_bad=1)).report
    assert (report.documents, report.empty, len(report.bad)) == (1, 1, 1)


def test_an_input_that_changes_is_told(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(PrimusError, match=r"in\.jsonl: changed while it was read"):
        filter_documents(job(corpus, tmp_path / "out"), show=lambda progress: os.utime(corpus, (1, 1)))
    assert not (tmp_path / "out").exists()


def test_c4_writes_what_it_has_left_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"text": each["text"]}) + "\n" for each in DECISIONS))
    done = filter_documents(job(file, tmp_path / "out", recipe=recipe.load_recipe("c4")))
    assert [text for text, _ in records(done.files)] == [each["c4_text"] for each in DECISIONS if each["c4_text"]]
    assert done.report.edits["c4.lines_dropped.no_terminal_punctuation"] > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from primus.data.readers import shard as shards
from primus.data.shards import shard_queue
shards.choose_shard_size = lambda size: 1 << 14
commit, done = shard_queue.ShardOutput.commit, []
def killed(self, shard):
    done.append(shard)
    if len(done) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return commit(self, shard)
shard_queue.ShardOutput.commit = killed
from primus.data.filter.cleaning import recipe
from primus.data.filter.cleaning.job import CleanJob
from primus.data.filter.result_folder import filter_documents
gopher = recipe.load_recipe("gopher")
filter_documents(CleanJob(inputs=(sys.argv[1],), output=Path(sys.argv[2]), recipe=gopher, workers=0))
"""


def test_a_killed_command_goes_on_and_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(corpus), str(tmp_path / "out")])
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    done_before = list(tmp_path.glob(".out.work/*/*.json"))
    assert len(done_before) == 3
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob(".out.work/*/*.jsonl.zst")}
    made_again = filter_documents(job(corpus, tmp_path / "out"))
    assert {path.stat().st_mtime_ns for path in made_again.files} >= set(stamps.values())
    whole = filter_documents(job(corpus, tmp_path / "whole"))
    assert [path.read_bytes() for path in made_again.files] == [path.read_bytes() for path in whole.files]
    assert not list(tmp_path.glob(".out.work"))

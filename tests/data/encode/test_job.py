from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from primus.data import atomic
from primus.data.encode import publish
from primus.data.encode.encode import EncodeStage
from primus.data.encode.job import EncodeJob, PreparedTokens, prepare_token_files
from primus.data.megatron import manifest as manifests
from primus.data.megatron.indexed_dataset import IndexedTokens, IndexedWriter, bin_path, idx_path
from primus.data.megatron.manifest import EncodeRecipe
from primus.data.readers import shard as shards
from primus.data.shards import executors, shard_queue, workers
from primus.data.tokenizers import canary
from primus.data.tokenizers.document_ends import END_OF_TEXT
from primus.data.tokenizers.fast import GigatokenEngine
from primus.data.tokenizers.load import load_tokenizer
from primus.data.tokenizers.tokenizer import Batch, Tokenizer
from primus.errors import PrimusError, UsageError

Prose = Callable[..., str]


def write_lines(path: Path, values: list[object]) -> Path:
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


def make(inputs: Path | list[Path], tokenizer: Path | str, output: Path, **settings: object) -> PreparedTokens:
    paths = inputs if isinstance(inputs, list) else [inputs]
    recipe = EncodeRecipe(**{key: settings.pop(key) for key in list(settings) if key in EncodeRecipe.__struct_fields__})  # type: ignore[arg-type]
    job = EncodeJob(inputs=tuple(map(str, paths)), tokenizer=str(tokenizer), output=output, recipe=recipe, **settings)  # type: ignore[arg-type]
    return prepare_token_files(job)[0]


def documents_of(prefix: Path) -> list[list[int]]:
    tokens = IndexedTokens(prefix)
    return [tokens[index].tolist() for index in range(len(tokens))]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_documents_become_tokens_that_end_with_the_end_of_document(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_file: Path, prose: Prose
) -> None:
    values = [prose(20, seed) for seed in range(5)]
    made = make(write_lines(tmp_path / "a.jsonl", [*values, ""]), tokenizer_file, tmp_path / "out")
    assert made.prefix == tmp_path / "out_text_document"
    assert documents_of(made.prefix) == [[*tokenizer.encode(value), 0] for value in values]
    assert (made.manifest.documents, made.manifest.empty_documents, made.manifest.dtype) == (5, 1, "uint16")
    assert load_tokenizer(made.prefix.parent / made.manifest.tokenizer.file).fingerprint == tokenizer.fingerprint
    assert manifests.read_manifest(made.prefix) == made.manifest
    assert sorted(content_of(tmp_path)) == [
        "a.jsonl",
        *(f"out_text_document.{end}" for end in ("bin", "idx", "manifest.json", "tokenizer.json")),
    ]


def test_settings_change_the_tokens_as_they_say(tmp_path: Path, tokenizer: Tokenizer, tokenizer_file: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [f"the fox{END_OF_TEXT}dogs"])
    plain = make(lines, tokenizer_file, tmp_path / "plain", append_eod=False)
    assert documents_of(plain.prefix) == [tokenizer.encode(f"the fox{END_OF_TEXT}dogs")]
    assert plain.manifest.special_strings == 1
    forged = make(lines, tokenizer_file, tmp_path / "forged", parse_special_tokens=True)
    assert documents_of(forged.prefix) == [[*tokenizer.encode("the fox"), 0, *tokenizer.encode("dogs"), 0]]


def test_the_same_job_again_does_nothing_and_another_is_refused(
    tmp_path: Path, tokenizer_file: Path, prose: Prose
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(20)])
    job = EncodeJob(inputs=(str(lines),), tokenizer=str(tokenizer_file), output=tmp_path / "out")
    prepare_token_files(job)
    before = content_of(tmp_path)
    times = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    said: list[str] = []
    os.utime(lines)
    assert not prepare_token_files(job, said.append)[0].made
    assert "nothing to do" in said[0]
    assert content_of(tmp_path) == before
    assert all(file.stat().st_mtime_ns == time for file, time in times.items() if file != lines)

    write_lines(lines, [prose(20), prose(30)])
    with pytest.raises(UsageError, match=r"differs: .*a.jsonl is new, gone or changed") as caught:
        prepare_token_files(job)
    assert "--overwrite" in caught.value.hint
    with pytest.raises(UsageError, match="its append_eod is True"):
        make(lines, tokenizer_file, tmp_path / "out", append_eod=False)
    with pytest.raises(UsageError, match="its tokenizer is"):
        make(lines, "bpe:280", tmp_path / "out")
    assert bin_path(tmp_path / "out_text_document").read_bytes() == before["out_text_document.bin"]
    assert make(lines, tokenizer_file, tmp_path / "out", existing="replace").manifest.documents == 2


def test_overwriting_makes_anew_what_is_damaged_and_nothing_else(
    tmp_path: Path, tokenizer_file: Path, prose: Prose
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(20)])
    made = make(lines, tokenizer_file, tmp_path / "out")
    before = content_of(tmp_path)
    job = EncodeJob(inputs=(str(lines),), tokenizer=str(tokenizer_file), output=tmp_path / "out", existing="replace")
    said: list[str] = []
    assert not prepare_token_files(job, said.append)[0].made
    assert said == [f"{made.prefix}: nothing to do, already made from the same input, and its checksums match"]
    for end, problem in {
        "bin": "is damaged, its checksum differs",
        "idx": "is damaged, its checksum differs",
        "tokenizer.json": "is missing or damaged",
        "manifest.json": "damaged manifest",
    }.items():
        path = tmp_path / f"out_text_document.{end}"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if end in ("bin", "idx") else content[:9])
        said.clear()
        assert prepare_token_files(job, said.append)[0].made
        assert len([line for line in said if "replaced: " in line and f"{path}" in line and problem in line]) == 1
        assert content_of(tmp_path) == before


def test_files_of_somebody_else_are_not_replaced(tmp_path: Path, tokenizer_file: Path, prose: Prose) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(20)])
    made = make(lines, tokenizer_file, tmp_path / "out")
    manifests.manifest_path(made.prefix).unlink()
    with pytest.raises(UsageError, match="it has no manifest"):
        make(lines, tokenizer_file, tmp_path / "out")


@pytest.mark.parametrize("text_documents", ["file", "paragraph", "line"])
def test_texts_files_and_trees_are_prepared_alike(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_file: Path, prose: Prose, text_documents: str
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "b.py").write_text("print('fox')\n")
    (tmp_path / "tree" / "a.txt").write_text("the fox\njumps\n\nover dogs\n")
    parts = {
        "file": ["the fox\njumps\n\nover dogs\n"],
        "paragraph": ["the fox\njumps\n", "over dogs\n"],
        "line": ["the fox", "jumps", "over dogs"],
    }[text_documents]
    made = make(tmp_path / "tree", tokenizer_file, tmp_path / "out", text_documents=text_documents)
    assert documents_of(made.prefix) == [[*tokenizer.encode(part), 0] for part in [*parts, "print('fox')\n"]]
    assert made.manifest.inputs[0].files == 2


def test_a_long_text_is_one_document_of_several_sequences(tmp_path: Path, tokenizer_file: Path, prose: Prose) -> None:
    (tmp_path / "a.txt").write_text(prose(60_000))
    made = make(tmp_path / "a.txt", tokenizer_file, tmp_path / "out")
    assert (made.manifest.documents, made.manifest.sequences) == (1, 6)
    sequences = documents_of(made.prefix)
    assert [sequence[-1] == 0 for sequence in sequences] == [False] * 5 + [True]
    assert IndexedTokens(made.prefix).borders.tolist() == [0, 6]


def test_each_json_key_becomes_a_pair_of_files(tmp_path: Path, tokenizer: Tokenizer, tokenizer_file: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"title": "fox", "body": "dogs"}\n')
    job = EncodeJob(
        inputs=(str(lines),), tokenizer=str(tokenizer_file), output=tmp_path / "out", json_keys=("title", "body")
    )
    title, body = prepare_token_files(job)
    assert documents_of(title.prefix) == [[*tokenizer.encode("fox"), 0]]
    assert (body.prefix.name, documents_of(body.prefix)) == ("out_body_document", [[*tokenizer.encode("dogs"), 0]])


def test_a_tokenizer_is_trained_on_the_input(tmp_path: Path, prose: Prose) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(50, seed) for seed in range(20)])
    one, two = (make(lines, "bpe:290", tmp_path / name) for name in ("one", "two"))
    assert one.manifest.tokenizer.vocab_size == 290
    assert one.manifest.bin.xxh3 == two.manifest.bin.xxh3
    assert not make(lines, "bpe:290", tmp_path / "one").made


def test_a_process_that_waits_to_train_takes_what_another_one_has_published(tmp_path: Path, prose: Prose) -> None:
    """The tasks of an array: one may train, encode and publish all shards while the others wait for its lock."""
    lines = write_lines(tmp_path / "a.jsonl", [prose(50, seed) for seed in range(20)])
    finished = make(lines, "bpe:290", tmp_path / "finished" / "out")
    waits, said = threading.Event(), []

    def say(text: str) -> None:
        said.append(text)
        if "waiting for" in text:
            waits.set()

    job = EncodeJob(inputs=(str(lines),), tokenizer="bpe:290", output=tmp_path / "out")
    with ThreadPoolExecutor(1) as pool:
        with atomic.hold_lock(tmp_path / ".out.lock", 10.0, lambda holder: None):
            waiting = pool.submit(prepare_token_files, job, say)
            assert waits.wait(30)
            for file in finished.prefix.parent.glob("out_*"):
                file.rename(tmp_path / file.name)
            shutil.rmtree(tmp_path / ".out.work", ignore_errors=True)
        (prepared,) = waiting.result(60)
    assert not prepared.made
    assert not any("training" in text for text in said)
    assert not (tmp_path / ".out.work").exists()


def test_a_tokenizer_that_was_trained_on_other_text_is_not_taken(
    tmp_path: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(publish, "publish_token_files", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(write_lines(tmp_path / "a.jsonl", [prose(200)]), "bpe:290", tmp_path / "out")
        assert len(list(tmp_path.glob(".out.work/tokenizer-*.json"))) == 1
    other = write_lines(tmp_path / "a.jsonl", ["other words of another text " * 20])
    made = [make(other, "bpe:290", tmp_path / name).manifest.tokenizer.fingerprint for name in ("out", "new")]
    assert made[0] == made[1]


def test_several_processes_write_the_same_bytes(tmp_path: Path, tokenizer_file: Path, prose: Prose) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(4, seed) for seed in range(6000)])
    one = make(lines, tokenizer_file, tmp_path / "one", workers=1)
    two = make(lines, tokenizer_file, tmp_path / "two", workers=2)
    assert (one.manifest.bin, one.manifest.idx) == (two.manifest.bin, two.manifest.idx)


def test_a_bad_document_is_an_error_that_names_it_and_leaves_nothing(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["fox", None, "dogs", None])
    with pytest.raises(PrimusError, match=r"a\.jsonl:2: field 'text' is null") as caught:
        make(lines, tokenizer_file, tmp_path / "out")
    assert "--max-bad" in caught.value.hint
    with pytest.raises(PrimusError, match=r"a\.jsonl:4: .* \(bad document 2 of at most 1\)"):
        make(lines, tokenizer_file, tmp_path / "out", max_bad=1)
    assert sorted(content_of(tmp_path)) == ["a.jsonl"]


def test_bad_documents_that_are_allowed_are_listed(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["fox", None, "dogs", None])
    said: list[str] = []
    job = EncodeJob(
        inputs=(str(lines),), tokenizer=str(tokenizer_file), output=tmp_path / "out", recipe=EncodeRecipe(max_bad=2)
    )
    made = prepare_token_files(job, said.append)[0]
    assert (made.manifest.documents, made.manifest.bad_documents) == (2, 2)
    listed = [json.loads(line) for line in (tmp_path / "out_text_document.bad.jsonl").read_text().splitlines()]
    assert [entry["where"] for entry in listed] == [f"{lines}:2", f"{lines}:4"]
    assert any("skipped 2 bad documents" in line for line in said)
    assert not make(lines, tokenizer_file, tmp_path / "out", max_bad=3).made
    with pytest.raises(UsageError, match="2 bad documents were skipped"):
        make(lines, tokenizer_file, tmp_path / "out", max_bad=1)


def test_new_token_files_have_no_list_of_bad_documents_of_the_old_ones(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["fox", None])
    make(lines, tokenizer_file, tmp_path / "out", max_bad=1)
    assert (tmp_path / "out_text_document.bad.jsonl").exists()
    write_lines(lines, ["fox", "dogs"])
    assert make(lines, tokenizer_file, tmp_path / "out", existing="replace").manifest.bad_documents == 0
    assert not (tmp_path / "out_text_document.bad.jsonl").exists()


def test_input_without_text_is_an_error(tmp_path: Path, tokenizer_file: Path) -> None:
    with pytest.raises(UsageError, match="no text in"):
        make(write_lines(tmp_path / "a.jsonl", ["", ""]), tokenizer_file, tmp_path / "out")
    assert sorted(content_of(tmp_path)) == ["a.jsonl"]


def test_input_of_bad_documents_only_is_an_error_that_names_one(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [None, ""])
    with pytest.raises(UsageError, match="no text in") as caught:
        make(lines, tokenizer_file, tmp_path / "out", max_bad=2)
    assert f"empty or bad, for example {lines}:1: " in caught.value.hint
    assert sorted(content_of(tmp_path)) == ["a.jsonl"]


def test_a_file_that_is_given_twice_is_an_error(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = write_lines(tmp_path / "texts.jsonl", ["fox"])
    for again in (lines, tmp_path, tmp_path / "t*.jsonl"):
        with pytest.raises(UsageError, match=rf"{lines} is given twice, by {lines} and by"):
            make([lines, again], tokenizer_file, tmp_path / "out")


def test_an_interrupt_tells_what_is_kept(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SMALLEST_SHARD_BYTES", 2_000)
    lines = write_lines(tmp_path / "a.jsonl", [prose(200, seed) for seed in range(5)])
    run = EncodeStage.run

    def interrupted(self: EncodeStage, shard: shards.Shard, output: shard_queue.ShardOutput) -> None:
        if shard.index == 2:
            raise KeyboardInterrupt
        run(self, shard, output)

    monkeypatch.setattr(EncodeStage, "run", interrupted)
    monkeypatch.setattr(executors, "run", lambda queue, executor, count, name, show: workers.run(queue, 0, name, show))
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        prepare_token_files(
            EncodeJob(inputs=(str(lines),), tokenizer=str(tokenizer_file), output=tmp_path / "out"), said.append
        )
    assert said == ["2 of 3 shards are finished: run the same command again to resume"]


def test_input_that_changes_while_it_is_read_is_an_error(tmp_path: Path, tokenizer_file: Path, prose: Prose) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(20)])
    job = EncodeJob(inputs=(str(lines),), tokenizer=str(tokenizer_file), output=tmp_path / "out")
    with pytest.raises(PrimusError, match=r"a\.jsonl: changed while it was read"):
        prepare_token_files(job, show=lambda progress: os.utime(lines, ns=(1, 1)))
    assert sorted(content_of(tmp_path)) == ["a.jsonl"]


@pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="gigatoken is not installed")
def test_it_is_said_once_that_the_library_took_over(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_file: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SMALLEST_SHARD_BYTES", 2_000)
    lines = write_lines(tmp_path / "a.jsonl", [prose(200, seed) for seed in range(5)])

    def fail(self: GigatokenEngine, texts: Sequence[str]) -> Batch:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(GigatokenEngine, "_encode_all", fail)
    said: list[str] = []
    prepare_token_files(
        EncodeJob(inputs=(str(lines),), tokenizer=str(tokenizer_file), output=tmp_path / "out", workers=1), said.append
    )
    assert ["RuntimeError: out of luck" in line for line in said] == [False, True]
    assert documents_of(tmp_path / "out_text_document")[0] == [*tokenizer.encode(prose(200, 0)), 0]


@pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="gigatoken is not installed")
def test_nothing_of_a_fast_way_that_proved_wrong_is_taken_without_it(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_file: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SMALLEST_SHARD_BYTES", 2_000)
    monkeypatch.setattr(canary, "FIRST", 0)
    monkeypatch.setattr(canary, "_is_drawn", lambda text: "looked at" in text)
    texts = [prose(200, seed) for seed in range(5)] + ["looked at"]
    lines = write_lines(tmp_path / "a.jsonl", list(texts))
    right = GigatokenEngine._encode_all

    def wrong(self: GigatokenEngine, texts: Sequence[str]) -> Batch:
        tokens, lengths = right(self, texts)
        return tokens[::-1], lengths

    with monkeypatch.context() as patch:
        patch.setattr(GigatokenEngine, "_encode_all", wrong)
        with pytest.raises(PrimusError, match="the fast tokenizer gives") as caught:
            make(lines, tokenizer_file, tmp_path / "out", workers=1)
    assert "--no-fast" in caught.value.hint
    assert len(list(tmp_path.glob(".out.work/*/*.json"))) == 2
    made = make(lines, tokenizer_file, tmp_path / "out", workers=1, fast=False)
    assert documents_of(made.prefix) == [[*tokenizer.encode(text), 0] for text in texts]
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, tokenizer_file: Path, prose: Prose) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(20)])
    make(lines, tokenizer_file, tmp_path / "out")
    before = content_of(tmp_path)
    more = write_lines(tmp_path / "b.jsonl", [prose(2000, seed) for seed in range(20)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(PrimusError, match="out: cannot be written: File too large") as caught:
            make(more, tokenizer_file, tmp_path / "out", existing="replace")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free some space" in caught.value.hint
    assert content_of(tmp_path) == before | {"b.jsonl": more.read_bytes()}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["fox"])
    with pytest.raises(PrimusError, match=r"a\.jsonl.*cannot be written"):
        make(lines, tokenizer_file, lines / "out")


PROGRAM = """
import sys
from pathlib import Path
from primus.data.encode.job import EncodeJob, prepare_token_files

if __name__ == "__main__":
    job = EncodeJob(inputs=(sys.argv[1],), tokenizer=sys.argv[2], output=Path(sys.argv[3]), workers=int(sys.argv[4]))
    wait = "wait" in sys.argv
    made = prepare_token_files(job, show=lambda progress: print("progress", flush=True) or wait and sys.stdin.read())
    print("made" if made[0].made else "found", flush=True)
"""


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that prepares data."""
    program = tmp_path_factory.mktemp("program") / "program.py"
    program.write_text(PROGRAM)
    with ExitStack() as stack:

        def begin(*words: object) -> subprocess.Popen[str]:
            command = [sys.executable, program, *map(str, words)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return stack.enter_context(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]

        yield begin


def test_of_processes_that_start_together_one_prepares(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, start: Callable[..., subprocess.Popen[str]]
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(300, seed) for seed in range(300)])
    processes = [start(lines, tokenizer_file, tmp_path / "out", 1) for _ in range(3)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(text.splitlines()[-1] for text in said) == ["found", "found", "made"]
    assert documents_of(tmp_path / "out_text_document")


def test_a_killed_writer_leaves_nothing_that_the_next_one_minds(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, start: Callable[..., subprocess.Popen[str]]
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(200, seed) for seed in range(40)])
    process = start(lines, tokenizer_file, tmp_path / "out", 1, "wait")
    assert process.stdout
    assert process.stdout.readline() == "progress\n"
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    assert any(".tmp." in name for name in content_of(tmp_path))
    assert not idx_path(tmp_path / "out_text_document").exists()
    assert make(lines, tokenizer_file, tmp_path / "out").made
    assert not any(".tmp." in name or "lock" in name for name in content_of(tmp_path))


def test_a_killed_parent_leaves_no_worker(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, start: Callable[..., subprocess.Popen[str]]
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(3000, seed) for seed in range(1000)])
    process = start(lines, tokenizer_file, tmp_path / "out", 2)
    assert process.stdout
    assert process.stdout.readline() == "progress\n"
    workers = psutil.Process(process.pid).children()
    assert len(workers) >= 2
    process.kill()
    process.wait(timeout=10)
    left = psutil.wait_procs(workers, timeout=20)[1]
    assert all(worker.status() == psutil.STATUS_ZOMBIE for worker in left)


@pytest.fixture
def interrupted(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[Path]]:
    """Lines whose shards are all encoded, and the token files of these shards, not yet joined."""
    monkeypatch.setattr(shards, "SMALLEST_SHARD_BYTES", 20_000)
    lines = write_lines(tmp_path / "a.jsonl", [prose(200, seed) for seed in range(100)])
    with monkeypatch.context() as patch:
        patch.setattr(publish, "publish_token_files", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(lines, tokenizer_file, tmp_path / "out")
    encoded = sorted((tmp_path / ".out.work").glob("*/*.bin"))
    assert len(encoded) > 4
    return lines, encoded


def interrupt(*args: object, **settings: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_command_goes_on_where_it_was(
    tmp_path: Path, tokenizer_file: Path, interrupted: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, encoded = interrupted
    done: list[int] = []
    run = EncodeStage.run
    monkeypatch.setattr(
        EncodeStage, "run", lambda self, shard, output: [done.append(shard.index), run(self, shard, output)]
    )
    monkeypatch.setattr(executors, "run", lambda queue, executor, count, name, show: workers.run(queue, 0, name, show))
    os.truncate(encoded[2], 1)
    made = make(lines, tokenizer_file, tmp_path / "out")
    assert done == [2]
    whole = make(lines, tokenizer_file, tmp_path / "whole")
    assert (made.manifest.bin, made.manifest.idx) == (whole.manifest.bin, whole.manifest.idx)
    assert not (tmp_path / ".out.work").exists()


def test_a_damaged_shard_is_named_and_made_again_by_the_same_command(
    tmp_path: Path, tokenizer_file: Path, interrupted: tuple[Path, list[Path]]
) -> None:
    lines, encoded = interrupted
    content = bytearray(encoded[2].read_bytes())
    content[7] ^= 1
    encoded[2].write_bytes(content)
    with pytest.raises(PrimusError, match=rf"{encoded[2]}: damaged since it was written: its checksum differs"):
        make(lines, tokenizer_file, tmp_path / "out")
    assert not bin_path(tmp_path / "out_text_document").exists()
    made = make(lines, tokenizer_file, tmp_path / "out")
    assert made.manifest.bin == make(lines, tokenizer_file, tmp_path / "whole").manifest.bin


def test_a_command_that_allows_more_bad_documents_goes_on_too(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SMALLEST_SHARD_BYTES", 2_000)
    lines = write_lines(tmp_path / "a.jsonl", [*(prose(200, seed) for seed in range(5)), None])
    monkeypatch.setattr(executors, "run", lambda queue, executor, count, name, show: workers.run(queue, 0, name, show))
    with pytest.raises(PrimusError, match=r"a\.jsonl:6"):
        make(lines, tokenizer_file, tmp_path / "out")
    run = EncodeStage.run
    done: list[int] = []
    monkeypatch.setattr(
        EncodeStage, "run", lambda self, shard, output: [done.append(shard.index), run(self, shard, output)]
    )
    assert make(lines, tokenizer_file, tmp_path / "out", max_bad=1).manifest.bad_documents == 1
    assert done == [2]


def test_an_interrupt_between_two_files_leaves_no_manifest_of_others_and_is_made_good(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(write_lines(tmp_path / "a.jsonl", [prose(20)]), tokenizer_file, tmp_path / "out")
    lines = write_lines(tmp_path / "a.jsonl", [prose(20, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make(lines, tokenizer_file, tmp_path / "out", existing="replace")
    assert manifests.read_manifest(tmp_path / "out_text_document") is None
    assert make(lines, tokenizer_file, tmp_path / "out").made


def test_input_that_changes_after_it_was_read_is_an_error(
    tmp_path: Path, tokenizer_file: Path, prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(20)])
    run = executors.run

    def changed_after(*given: object) -> list[shard_queue.ShardResult]:
        rows = run(*given)  # type: ignore[arg-type]
        os.utime(lines, ns=(1, 1))
        return rows

    monkeypatch.setattr(executors, "run", changed_after)
    with pytest.raises(PrimusError, match=r"a\.jsonl: changed while it was read"):
        make(lines, tokenizer_file, tmp_path / "out")


def test_other_settings_take_nothing_from_an_interrupted_command(
    tmp_path: Path, tokenizer_file: Path, interrupted: tuple[Path, list[Path]]
) -> None:
    lines, _ = interrupted
    made = make(lines, tokenizer_file, tmp_path / "out", append_eod=False)
    assert made.manifest.tokens + 100 == make(lines, tokenizer_file, tmp_path / "whole").manifest.tokens
    assert not (tmp_path / ".out.work").exists()


KILLED = """
import os, random, signal, sys
from pathlib import Path
import gigatoken, tokenizers
from primus.data.readers import shard
from primus.data.shards import shard_queue
from primus.data.encode import job as prepares
from primus.data.megatron.indexed_dataset import IndexedWriter
from primus.data.encode.job import EncodeJob, prepare_token_files

shard.SMALLEST_SHARD_BYTES = 8000
prepares._Preparation._choose_num_workers = lambda self, board: 0
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
            for name in ("replace", "unlink", "fsync", "mkdir", "rmdir"):
                setattr(os, name, deadly(getattr(os, name)))
            IndexedWriter._write_content = deadly(IndexedWriter._write_content)
            shard_queue.ShardOutput.add_counts = deadly(shard_queue.ShardOutput.add_counts)
        prepare_token_files(EncodeJob(inputs=(sys.argv[1],), tokenizer="bpe:290", output=folder / "out"))
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def content(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

root, kills = Path(sys.argv[2]), 0
assert make(root / "whole", 0) == 0
choose = random.Random(int(sys.argv[3]))
for number in range(3):
    folder = root / str(number)
    while make(folder, choose.randrange(1, 100)):
        kills += 1
    assert make(folder, 0) == 0
    assert content(folder) == content(root / "whole"), sorted(content(folder))
    assert sorted(folder.iterdir()) == sorted(folder / name for name in content(folder))
print(kills)
"""


def test_killed_at_any_moment_the_same_command_makes_the_same_bytes(tmp_path: Path, prose: Prose) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(200, seed) for seed in range(40)])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, lines, tmp_path, "7"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


ORDER = """
import os, sys
from pathlib import Path
from primus.data.encode.job import EncodeJob, prepare_token_files

prefix, steps = Path(sys.argv[2]), []

def note(event, args):
    if event in ("os.remove", "os.rename"):
        name = Path(args[0 if event == "os.remove" else 1]).name
        if name.startswith(prefix.name) and ".tmp." not in name:
            steps.append((event, name))

def sync(descriptor, fsync=os.fsync):
    if os.readlink(f"/proc/self/fd/{descriptor}") == str(prefix.parent):
        steps.append(("sync", ""))
    fsync(descriptor)

prepare_token_files(EncodeJob(inputs=(sys.argv[1],), tokenizer="bpe:290", output=prefix))
sys.addaudithook(note)
os.fsync = sync
prepare_token_files(EncodeJob(inputs=(sys.argv[1],), tokenizer="bpe:291", output=prefix, existing="replace"))
renamed = next(number for number, (event, name) in enumerate(steps) if event == "os.rename" and name.endswith("bin"))
deleted = [number for number, (event, name) in enumerate(steps[:renamed]) if name.endswith((".manifest.json", ".idx"))]
assert len(deleted) == 2, steps
assert all(steps[number + 1][0] == "sync" for number in deleted), steps
names = [number for number, (event, name) in enumerate(steps) if event == "os.rename"]
assert len(names) > 2 and all(steps[number + 1 : number + 2] == [("sync", "")] for number in names), steps
"""


def test_the_old_manifest_is_deleted_on_disk_before_the_new_files_have_their_names(
    tmp_path: Path, prose: Prose
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [prose(200, seed) for seed in range(4)])
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", ORDER, lines, tmp_path / "out" / "tokens"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def encode(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "primus.cli.main", "--json", "direct", "--", "data", "encode", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_options_of_megatrons_script_are_taken(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fox"}\n{"text": "dogs"}\n')
    described = json.loads(tokenizer_file.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(described["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in described["merges"]))
    theirs = ("--output-prefix", tmp_path / "theirs", "--tokenizer-type", "GPT2BPETokenizer", "--workers", 1)
    files = ("--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt", "--log-interval", 10)
    files += ("--keep-sequential-samples", "--partitions", 1)  # type: ignore[assignment]
    done = encode("--input", tmp_path / "a.jsonl", *theirs, *files)
    assert done.returncode == 0, done.stderr
    for option in ("--log-interval", "--keep-sequential-samples", "--partitions"):
        assert f"{option} has no effect" in done.stderr
    [without_ends] = json.loads(done.stdout)
    assert without_ends["prefix"] == f"{tmp_path}/theirs_text_document"
    [ours] = json.loads(
        encode("--input", tmp_path / "a.jsonl", "--output", tmp_path / "o", "--tokenizer", tokenizer_file).stdout
    )
    assert (without_ends["documents"], without_ends["tokens"] + 2) == (2, ours["tokens"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to encode"),
        (["--input", "a", "--output", "o", "--output-prefix", "o"], "two outputs"),
        (["--input", "a"], "no output"),
        (["--input", "a", "--output", "o/", "--tokenizer", "t"], "output 'o/' is a folder"),
        (["--input", "a", "--output", "o"], "give --tokenizer PATH"),
        (
            ["--input", "a", "--output", "o", "--tokenizer-type", "GPT2BPETokenizer"],
            "give --vocab-file and",
        ),
        (["--input", "a", "--output", "o", "--vocab-file", "v"], "needs both"),
        (["--input", "a", "--output", "o", "--tokenizer", "t", "--lang", "german"], "--lang without --split-sentences"),
        (["--input", "a", "--output", "o", "--tokenizer", "t", "--keep-newlines"], "give --split-sentences too"),
        (["--input", "a", "--output", "o", "--tokenizer", "t", "--shuffle-seed", "1"], "give --shuffle too"),
        (["--input", "a", "--output", "o", "--tokenizer", "t", "--tiktoken-pattern", "v1"], "TikTokenizer"),
        (["--input", "a", "--output", "o", "--tokenizer-type", "HuggingFace"], "did you mean 'HuggingFaceTokenizer'?"),
        (["--input", "a", "--output", "o", "--tokenizer", "t", "--tokenizer-model", "m"], "several tokenizers: t, m"),
    ],
)
def test_what_is_missing_or_given_twice_is_named(words: list[str], message: str) -> None:
    done = encode(*words)
    assert done.returncode == 2
    assert message in done.stderr

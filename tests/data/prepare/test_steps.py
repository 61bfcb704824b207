from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = ("--input", "{}/a.jsonl", "--output", "{}/x")


def prepare(*words: object, json_wanted: bool = False) -> subprocess.CompletedProcess[str]:
    before = ["--json"] if json_wanted else []
    command = [sys.executable, "-m", "primus.cli.main", *before, "direct", "--", "data", "prepare", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_text_is_prepared_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 50)
    words = ("--input", tmp_path / "a.txt", "--tokenizer", "bpe:280", "--output", tmp_path / "out")
    done = prepare(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"--train_data_path {tmp_path}/out_text_document\n"
    assert "50 documents" not in done.stderr
    assert "tokens in 1 documents (uint16)" in done.stderr
    again = prepare(*words, json_wanted=True)
    [result] = json.loads(again.stdout)
    assert (result["made"], result["documents"], result["vocab_size"] <= 280) == (False, 1, True)
    assert "nothing to do" in again.stderr


def test_several_inputs_and_settings_reach_the_job(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "fox"}\n{"body": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "dogs"}\n')
    done = prepare(
        *("--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--json-keys", "body", "--no-append-eod"),
        *("--max-bad", 1, "--tokenizer", "bpe:257", "--output", tmp_path / "out", "--workers", 2),
        json_wanted=True,
    )
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)
    assert (result["documents"], result["tokens"], result["bad_documents"]) == (2, len("foxdogs"), 1)
    assert (tmp_path / "out_body_document.bad.jsonl").exists()


def test_named_datasets_are_listed_without_importing_them() -> None:
    done = prepare("--list")
    assert done.returncode == 0
    assert "\npython-stdlib  Python's own standard library" in done.stdout
    assert "python-stdlib" in json.loads(prepare("--list", json_wanted=True).stdout)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "give --input PATH... or --dataset NAME"),
        (["--input", "nothing.txt"], 2, "no tokenizer"),
        (["--input", "nothing.txt", "--tokenizer", "bpe:300"], 2, "no output"),
        (["--input", "nothing.txt", "--tokenizer", "bpe:300", "--output", "{}/o/x"], 2, "nothing.txt: no such file"),
        (["--input", "{}/e.txt", "--tokenizer", "bpe:300", "--output", "{}/o/x"], 2, "e.txt: empty"),
        (["--input", "{}/a.jsonl", "--tokenizer", "bpe:30", "--output", "{}/x"], 2, "at least 257"),
        (["--input", "{}/a.jsonl", "--tokenizer", "bpe:many", "--output", "{}/x"], 2, "like bpe:8192"),
        (["--input", "{}/a.jsonl", "--tokenizer", "{}/t.json", "--output", "{}/o/x"], 2, "t.json: no such tokenizer"),
        ([*GOOD, "--tokenizer", "bpe:300"], 1, "a.jsonl:1: not JSON"),
        (["--dataset", "python-stdlb", "--tokenizer", "bpe:300"], 2, "did you mean 'python-stdlib'?"),
        ([*GOOD, "--tokenizer", "{}/t.json", "--clean", "minimal"], 2, "t.json: no such tokenizer"),
        ([*GOOD, "--tokenizer", "bpe:many", "--dedup", "exact"], 2, "like bpe:8192"),
        ([*GOOD, "--tokenizer", "bpe:300", "--dedup", "exact", "--max-removed", "1"], 2, "or give --dedup minhash"),
        ([*GOOD, "--tokenizer", "bpe:300", "--dedup", "exact", "--clean", "minmal"], 2, "did you mean 'minimal'?"),
    ],
)
def test_bad_input_gets_one_message_and_leaves_nothing(
    tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "e.txt").touch()
    (tmp_path / "a.jsonl").write_text("{\n")
    done = prepare(*(word.format(tmp_path) for word in words))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "e.txt"]


def test_text_is_cleaned_and_copies_are_removed_before_it_is_tokenized(tmp_path: Path) -> None:
    long = "the quick brown fox jumps over the lazy dog and runs away from seven toxic wizards " * 4
    values = [long, "short", long, long + "again"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    words = ("--input", tmp_path / "a.jsonl", "--tokenizer", "bpe:280", "--output", tmp_path / "out")
    done = prepare(*words, "--clean", "minimal", "--dedup", "exact", json_wanted=True)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)
    assert result["documents"] == 2
    assert "out_text_document: verified" in done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"out.clean", "out.unique"}
    [again] = json.loads(prepare(*words, "--clean", "minimal", "--dedup", "exact", json_wanted=True).stdout)
    assert not again["made"]


def test_most_documents_are_removed_as_near_duplicates_only_if_asked(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog and runs away from seven toxic wizards of the number"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{text} {each}"}) + "\n" for each in range(40)))
    words = ("--input", tmp_path / "a.jsonl", "--tokenizer", "bpe:280", "--output", tmp_path / "out")
    refused = prepare(*words, "--dedup", "minhash")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "39 of 40 documents (98%)" in refused.stderr and "--max-removed 1 removes them" in refused.stderr
    [result] = json.loads(prepare(*words, "--dedup", "minhash", "--max-removed", 1, json_wanted=True).stdout)
    assert result["documents"] == 1

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LINES = [
    {"id": 1, "text": "One paragraph about the quick brown fox, which jumps over a lazy dog."},
    {"id": 2, "text": "Something else: seven wizards make toxic brew for the evil queen and jack."},
    {"id": 3, "text": "ONE PARAGRAPH ABOUT THE QUICK BROWN FOX WHICH JUMPS OVER A LAZY DOG"},
    {"id": 4, "text": "Something else: seven wizards make toxic brew for the evil queen and jack."},
]


def dedup(*words: object, json_wanted: bool = False) -> subprocess.CompletedProcess[str]:
    before = ["--json"] if json_wanted else []
    command = [sys.executable, "-m", "primus.cli.main", *before, "direct", "--", "data", "dedup", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_copies_are_removed_from_the_command_line(tmp_path: Path, lines: Path) -> None:
    done = dedup("--input", lines, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "kept              2\n" in done.stdout
    assert "4 documents, 2 kept, 50.0 % removed: 1 exact and 1 near-duplicates in 2 clusters\n" in done.stderr
    assert "14 bands x 8 rows over 5-word shingles; probability to find a pair" in done.stderr
    again = json.loads(dedup("--input", lines, "--output", tmp_path / "out", json_wanted=True).stdout)
    assert (again["made"], again["kept"], again["removed_exact"], again["removed_near"]) == (False, 2, 1, 1)
    assert json.loads(Path(again["report"]).read_text())["recipe"]["bands"] == 14
    assert Path(again["page"]).read_text().startswith("<!doctype html>")


def test_settings_reach_the_recipe(tmp_path: Path, lines: Path) -> None:
    settings = ("--bands", 3, "--rows", 2, "--ngram", 4, "--seed", 9)
    done = dedup("--input", lines, "--output", tmp_path / "out", *settings, json_wanted=True)
    recipe = json.loads(Path(json.loads(done.stdout)["report"]).read_text())["recipe"]
    assert [recipe[name] for name in ("bands", "rows", "ngram", "seed")] == [3, 2, 4, 9]
    lines.write_text(lines.read_text().replace('"text"', '"body"'))
    words = dedup("--input", lines, "--output", tmp_path / "w", "--method", "exact", "--normalize", json_wanted=True)
    assert json.loads(words.stdout)["kept"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --input PATH... or --dataset NAME"),
        (["--input", "{}/a.jsonl"], "give --output FOLDER"),
        (["--input", "{}/b.jsonl", "--output", "{}/o"], "b.jsonl: no such file"),
        (["--input", "{}/two.csv", "--output", "{}/o"], "which its first line must name: a, b"),
        (["--input", "{}/a.jsonl", "--output", "{}/o", "--normalize"], "--normalize with --method minhash"),
        (["--input", "{}/a.jsonl", "--output", "{}/o", "--bands", "999", "--rows", "9"], "at most 4096 hashes"),
        (["--input", "{}/a.jsonl", "--output", "{}/full"], "exists and differs: it has no dedup.json"),
        (["--input", "{}/a.jsonl", "--output", "{}"], "a.jsonl: the input is inside the output {}"),
        (["--input", "{}", "--output", "{}/full/o"], "full/o: the output is inside the input {}"),
    ],
)
def test_mistakes_are_told_without_a_traceback(tmp_path: Path, lines: Path, words: list[str], message: str) -> None:
    (tmp_path / "two.csv").write_text("a,b\n1,2\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    done = dedup(*(word.format(tmp_path) for word in words))
    assert done.returncode == 2
    assert message.format(tmp_path) in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()

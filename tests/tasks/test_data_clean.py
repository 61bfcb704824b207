from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SENTENCE = "The quick brown fox has to be with the lazy dog of that old house, and they have rest. "


def clean(*words: object, json_wanted: bool = False) -> subprocess.CompletedProcess[str]:
    before = ["--json"] if json_wanted else []
    command = [sys.executable, "-m", "primus.cli.main", *before, "direct", "--", "data", "clean", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_documents_are_cleaned_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    texts = [SENTENCE * 2, "too short", "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 4]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{broken\n")
    words = ("--input", file, "--recipe", "tprimat", "--output", tmp_path / "out", "--workers", 1)
    refused = clean(*words)
    assert refused.returncode == 1 and f"{file}:4" in refused.stderr and "Traceback" not in refused.stderr
    done = clean(*words, "--max-bad", 1, json_wanted=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["documents"], result["kept"], result["removed"], result["bad_documents"]) == (3, 2, {"length": 1}, 1)
    assert "min_characters" in done.stderr
    manifest = json.loads(Path(result["report"]).read_text())
    assert list(manifest["files"]) == ["000000.jsonl.zst"]
    assert "nothing to do" in clean(*words, "--max-bad", 1).stderr


def test_recipes_are_listed_with_their_thresholds() -> None:
    listed = clean("--list", json_wanted=True)
    recipes = json.loads(listed.stdout)
    assert {"c4", "fineweb", "gopher", "minimal", "tprimat"} <= set(recipes)
    assert recipes["tprimat"]["rules"][0]["min_words"] == 20


def test_mistakes_are_explained() -> None:
    for words, problem in (
        ((), "nothing to clean"),
        (("--input", "x.jsonl"), "no output"),
        (("--input", "x.jsonl", "--output", "o"), "no recipe"),
        (("--input", "x.jsonl", "--recipe", "finweb", "--output", "o"), "did you mean 'fineweb'"),
    ):
        done = clean(*words)
        assert done.returncode == 2 and problem in done.stderr, done.stderr

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from local_hub import LocalHub, Repo

pytest.importorskip("huggingface_hub")
pytest.importorskip("zstandard")

NOBODY = "http://127.0.0.1:9"


def data(
    *words: object, hub: str = "http://127.0.0.1:9", json_wanted: bool = False
) -> subprocess.CompletedProcess[str]:
    before = ["--json"] if json_wanted else []
    command = [sys.executable, "-m", "primus.cli.main", *before, "direct", "--", "data", *map(str, words)]
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_a_dataset_is_fetched_from_the_command_line_once(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "line %d", "n": %d}\n' % (number, number) for number in range(20))
    with LocalHub() as hub:
        hub.repos["me/data"] = Repo({"train-0.jsonl": lines, "train-1.jsonl": b'{"text": "more"}\n{\n'})
        words = (
            "fetch",
            "me/data",
            "--split",
            "train",
            "--num-samples",
            30,
            "--output",
            tmp_path / "out",
            "--streaming",
        )
        done = data(*words, hub=hub.url)
        assert (done.returncode, done.stdout) == (0, f"--input {tmp_path}/out\n"), done.stderr
        assert "skipped 1 bad documents" in done.stderr
        assert re.search(r"train-1\.jsonl:2: not JSON", done.stderr)
        assert "the dataset has only 21 documents" in done.stderr
    again = data(*words, json_wanted=True)  # the hub is gone
    result = json.loads(again.stdout)
    assert (result["made"], result["documents"], result["bad_documents"], result["split"]) == (False, 21, 1, "train")
    assert "nothing to do" in again.stderr


def test_the_named_datasets_are_listed(tmp_path: Path) -> None:
    names = json.loads(data("fetch", "--list", json_wanted=True).stdout)
    assert {"fineweb", "fineweb-edu", "c4", "bookcorpus", "wikipedia", "python-stdlib"} <= set(names)
    assert all(names.values())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "give a dataset"),
        (["finewep"], 2, "did you mean 'fineweb'?"),
        (["c4", "--num-samples", "5"], 2, "give --output FOLDER"),
        (["c4", "--output", "{}/x"], 1, "allenai/c4: http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_cannot_be_fetched_gets_one_message(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    done = data("fetch", *(word.format(tmp_path) for word in words))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr

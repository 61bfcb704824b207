"""Each command of Primus-Rival has a counterpart in the docs, which plans what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from primus.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/coming-from-primus-rival.md"
SEED_COMMANDS = (
    *("./shell/build.sh", "./shell/run_data.sh", "./shell/run_train.sh", "./shell/run_wrap.sh", "./shell/run_purge.sh"),
    *("./shell/entry.sh", "train/train_amd_prim_llama.sh", "FRAMEWORK=mega", "PROFILING=true", "rocprofv3 --attach"),
)
CONFIG = """\
# Dataset: bc (BookCorpus) or c4
DATASET=bc
FRAMEWORK=prim
MBS=1           # Micro batch size per GPU
SL=2048
LR=3.0e-4
TP=1
PP=1
DP=8
GA=8
PRECISION=bf16
"""
"""The config.env of the seed's README."""


def read_rows() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (.*) \| `(.*)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(theirs, ours.replace("\\|", "|")) for theirs, ours in rows]


def test_each_command_of_the_seed_is_in_the_table() -> None:
    theirs = " ".join(row[0] for row in read_rows())
    missing = [command for command in SEED_COMMANDS if command not in theirs]
    assert not missing
    assert "secrets.env" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("theirs", "ours"), read_rows(), ids=[theirs.strip("`") for theirs, _ in read_rows()])
def test_counterpart_of_a_command_plans(
    theirs: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(ours)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    assert words.pop(0) == "./primus-cli"
    (tmp_path / "config.env").write_text(CONFIG)
    (tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n')
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code = main(["--dry-run", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    if "mega" in words or "FRAMEWORK=mega" in ours:
        assert "megatron" in said.out and "native" not in said.out.replace("prim is native", "")
    if "PROFILING" in ours:
        assert "steps=1:5" in said.out
    assert sorted(tmp_path.rglob("*")) == before

"""`hooks list` shows which hooks would run around a task, and runs none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.cli.main import main


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, text in {
        "hooks/1_a.sh": "# primus: once, lock\ntouch ran",
        "hooks/train/pretrain/2_b.py": "from primus.hook import hook\n@hook(timeout_s=9)\ndef check(context): ...\n",
        "hooks/data/prepare/after/1_c.sh": "touch ran",
        "hooks/train/pretrain/native/prepare.sh": "touch ran",
        "hooks/_library.sh": "touch ran",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(f"direct -- hooks list {words}".split()) == 0
    assert not Path("ran").exists()
    return capsys.readouterr().out


def test_the_hooks_of_one_task_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("train pretrain", capsys) == (
        "stage   task                   file                                    kind   where        limit\n"
        "before  train pretrain         hooks/1_a.sh                            sh     once, alone  600 s\n"
        "before  train pretrain         hooks/train/pretrain/2_b.py             check  each node      9 s\n"
        "before  train pretrain native  hooks/train/pretrain/native/prepare.sh  sh     each node    600 s\n"
    )
    assert shown("train pretrain native", capsys).endswith(
        "before  train pretrain  hooks/train/pretrain/native/prepare.sh  sh     each node    600 s\n"
    )


def test_a_task_without_workers_has_no_general_ones(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown("data", capsys)
    assert "hooks/data/prepare/after/1_c.sh" in out
    assert "1_a.sh" not in out


def test_as_json_they_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(shown("--json", capsys))
    mine = [each["action"] for each in values["hooks"] if each["task"] == "train pretrain"]
    assert mine[1] == {
        "kind": "hook",
        "file": "hooks/train/pretrain/2_b.py",
        "stage": "before",
        "once": False,
        "locked": False,
        "timeout_s": 9.0,
        "functions": ["check"],
    }
    assert values["places"][-1] == "hooks"


def test_where_there_are_none_the_places_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("runs show", capsys) == f"no hooks in {Path.cwd()}/config/primus/hooks, runner/helpers/hooks, hooks\n"


def test_an_unknown_backend_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("direct -- hooks list train pretrain nativ".split()) == 2
    assert capsys.readouterr().err.startswith("primus-cli: no framework 'nativ'\n  did you mean 'native'?")


def test_an_unknown_task_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("direct -- hooks list train pretrian".split()) == 2
    assert capsys.readouterr().err.startswith("primus-cli: no task 'train pretrian'\n  did you mean 'train pretrain'?")

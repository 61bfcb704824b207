"""The overview lists each task once, in groups, and hides those that only primus itself calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primus import registry
from primus.cli.main import main

TASK = '"""Print the phase of the moon."""\nfrom msgspec import Struct\nclass Options(Struct):\n    pass\n'


def read_overview(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Names of the rows in each section of the overview."""
    assert main(["--help"]) == 0
    sections: dict[str, list[str]] = {}
    for block in capsys.readouterr().out.split("\n\n"):
        title, _, rows = block.partition("\n")
        sections[title.removesuffix(":")] = re.findall(r"^  (\S+(?: \S+)?)  ", rows, re.MULTILINE)
    return sections


def test_overview_lists_each_task_once_and_hides_internal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    sections = read_overview(capsys)
    tasks = [name for title, names in sections.items() if title.startswith("tasks: ") for name in names]
    summaries = {name: registry.read_summary("tasks", name) for name in registry.list_plug_ins("tasks")}
    internal = {name for name, summary in summaries.items() if summary.endswith("(internal).")}
    assert internal
    assert sorted(tasks) == sorted(set(summaries) - internal)
    assert "tasks: other tasks" not in sections, "each task of the package has a group"


def test_task_of_a_plug_in_follows_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tasks/runs/archive.py", "tasks/moon.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TASK)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path))
    sections = read_overview(capsys)
    runs = sections["tasks: runs and jobs"]
    assert runs[runs.index("runs clean") + 1] == "runs archive"
    assert sections["tasks: other tasks"] == ["moon"]

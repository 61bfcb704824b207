"""The launcher stays short: how many files and functions a reader passes between a command line and the workers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from primus.machine.accelerators import find_accelerators
from primus.machine.probe import probe

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("launcher_files", ROOT / "tools/launcher_files.py")
assert SPEC is not None and SPEC.loader is not None
launcher_files = importlib.util.module_from_spec(SPEC)
sys.modules["launcher_files"] = launcher_files
SPEC.loader.exec_module(launcher_files)

pytestmark = pytest.mark.skipif(
    bool(find_accelerators(probe(tools="never"))), reason="a machine with GPUs reads more about itself"
)


@pytest.mark.parametrize(
    ("command", "most_files", "most_functions"),
    [("quick start", 50, 350), ("dry run of sbatch", 39, 256)],
)
def test_a_command_runs_through_at_most_so_many_files_and_functions(
    command: str, most_files: int, most_functions: int
) -> None:
    found = launcher_files.count_functions(launcher_files.COMMANDS[command])
    assert len(found["files"]) <= most_files, found["path"]
    assert found["functions"] <= most_functions, found["path"]


def test_workers_start_before_anything_is_imported_that_a_failure_an_engine_or_the_record_needs() -> None:
    found = launcher_files.count_functions(launcher_files.QUICK_START)
    assert "WorkerProcesses.__init__" in found["path"]
    later = ("primus.bootstrap", "primus.diagnosis", "primus.engines", "primus.runs.snapshot")
    assert [name for name in found["modules"] if name.startswith(later)] == []

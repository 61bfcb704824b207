"""The two runs that `runs diff` and `runs compare` are given."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.config.flags import PositionalRun
from primus.runs import store
from primus.runs.store import Run


class RunPairOptions(Struct, frozen=True, kw_only=True):
    """Options that name two runs."""

    a: PositionalRun
    """First run: folder, id or its beginning, or name of an experiment (its newest run)."""
    b: PositionalRun
    """Second run."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def find_run_pair(options: RunPairOptions) -> tuple[Run, Run]:
    """Both runs.

    Raises:
        UsageError: A run does not exist.
    """
    return store.find_run(options.a, Path(options.workspace)), store.find_run(options.b, Path(options.workspace))

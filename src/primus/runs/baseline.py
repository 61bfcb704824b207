"""Baseline files: the steps of earlier runs, by machine class and experiment."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError, UsageError
from primus.runs.files import read_json, write_json
from primus.runs.run_steps import RunSteps

MAX_RUNS = 10
"""Runs of each machine class and experiment that a baseline file keeps, the newest."""
FORMAT = 1


class BaselineFile(Struct, frozen=True, kw_only=True):
    """The content of a baseline file."""

    format: int = FORMAT
    runs: list[RunSteps] = []


def read_baseline_file(path: Path) -> BaselineFile:
    """Read a baseline file.

    Raises:
        PrimusError: It cannot be read, is not a baseline file or was edited so that columns have different lengths.
    """
    found = read_json(path, BaselineFile)
    if found.format != FORMAT:
        raise PrimusError(f"{path}: format {found.format}, this version reads {FORMAT}", "save the baseline again")
    for run in found.runs:
        wrong = [name for name, column in run.columns.items() if len(column) != len(run.steps)]
        if wrong or not run.steps or run.starts[:1] != [0] or run.starts != sorted(set(run.starts)):
            place = f"column {wrong[0]}" if wrong else "steps and starts"
            raise PrimusError(f"{path}: damaged: run {run.run}: {place} do not match", "save the baseline again")
    return found


def select_baselines(path: Path, run: RunSteps) -> list[RunSteps]:
    """The runs of a baseline file with the machine class and experiment of `run`.

    Raises:
        UsageError: It has none.
    """
    runs = [each for each in read_baseline_file(path).runs if each.run != run.run]
    matching = [each for each in runs if each.machine == run.machine and each.name == run.name]
    if matching:
        return matching
    known = sorted({f"{each.name} on {each.machine}" for each in runs})
    raise UsageError(
        f"{path} has no baseline of {run.name} on {run.machine}",
        f"add one: runs gate RUN --save-baseline {path}; it has: {'; '.join(known) or 'no other run'}",
    )


def save_baseline(path: Path, run: RunSteps) -> int:
    """Add `run` to a baseline file, which is created if needed; gives the number of runs like it in the file."""
    runs = read_baseline_file(path).runs if path.exists() else []
    others = [each for each in runs if (each.machine, each.name) != (run.machine, run.name)]
    like_it = [each for each in runs if each not in others and each.run != run.run]
    kept = [*sorted(like_it, key=lambda each: each.created), run][-MAX_RUNS:]
    write_json(path, BaselineFile(runs=[*others, *kept]))
    return len(kept)

"""The evaluations of the checkpoints of a run, one file each in `report/evaluations/`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from primus.errors import PrimusError
from primus.runs.files import read_json, write_json
from primus.runs.store import Run

FOLDER = "report/evaluations"


class CheckpointEvaluation(Struct, frozen=True, kw_only=True):
    """One evaluation of a checkpoint."""

    name: str
    """What it was evaluated on: ``validation``, ``data FILE``, ``exact_match FILE`` or ``task NAME``."""
    step: int | None
    """Optimizer steps of the checkpoint, where it says so."""
    metrics: dict[str, float]
    settings: dict[str, Any] = {}
    """What the metrics depend on besides the checkpoint."""
    time: float = 0.0
    """When it was done, in seconds since the epoch."""
    version: str = ""
    """Version of primus."""


def write_evaluation(run: Run, done: CheckpointEvaluation) -> None:
    """Keep an evaluation; it replaces an earlier one of the same step on the same data.

    Raises:
        PrimusError: The run folder cannot be written.
    """
    place = "weights" if done.step is None else f"step_{done.step:08d}"
    write_json(run.directory / FOLDER / f"{place}.{re.sub(r'[^A-Za-z0-9._-]+', '-', done.name)}.json", done)


def read_evaluations(run: Run) -> list[CheckpointEvaluation]:
    """The evaluations of a run by step and name, without damaged ones."""
    found = []
    for path in sorted((run.directory / FOLDER).glob("*.json")):
        try:
            found.append(read_json(path, CheckpointEvaluation))
        except PrimusError:  # of another version
            continue
    return sorted(found, key=lambda each: (each.step or 0, each.name))


def select_newest(evaluations: Sequence[CheckpointEvaluation]) -> dict[str, float]:
    """The metrics of the latest step on each data, by the names of both."""
    newest = {each.name: each for each in evaluations}
    return {f"{name}: {metric}": value for name, each in newest.items() for metric, value in each.metrics.items()}

"""Keep the newest loss of a run in one file, for a program that polls it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from primus.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from primus.observer import ObservedRun
    from primus.runs.events import Event
    from primus.runs.run_metrics import RunMetrics


class Options(Struct, frozen=True, kw_only=True):
    """Options of `last_step`."""

    file: str = "last_step.txt"
    """Name of the file in the run folder."""


class LastStep(Observer):
    """Writes one line after each look at the events."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def observe(self, events: Sequence[Event], metrics: RunMetrics) -> None:
        """Replace the file."""
        step = metrics.last_step
        self.path.write_text(f"{metrics.state} {step.get('step', 0)} {step.get('loss', '-')}\n", encoding="utf-8")


def open_observer(options: Options, observed: ObservedRun) -> LastStep:
    """Start to observe."""
    return LastStep(observed.run.directory / options.file)

"""A record of the time that Python's garbage collection takes in a step, which explains slow steps of a comparison."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

from primus.callback import Callback, StepReport

EVENT = "garbage_collection"
SMALLEST_SHARE = 0.01
"""Share of a step from which its collections are recorded."""


class CollectionRecorder(Callback):
    """Records the collections of rank 0.

    Args:
        append_event: Appends to the events of the run, on rank 0.
    """

    def __init__(self, append_event: Callable[..., None]) -> None:
        self._append_event = append_event
        # The collector calls back in the thread that triggers it; threads of this process share one interpreter lock.
        self._began = self._total_s = 0.0
        gc.callbacks.append(self._note_collection)

    def after_report(self, report: StepReport) -> None:
        total, self._total_s = self._total_s, 0.0
        if total > SMALLEST_SHARE * report.step_time_s:
            self._append_event(EVENT, step=report.step, time_s=round(total, 6))

    def close(self) -> None:
        if self._note_collection in gc.callbacks:
            gc.callbacks.remove(self._note_collection)

    def _note_collection(self, phase: str, info: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._total_s += now - self._began

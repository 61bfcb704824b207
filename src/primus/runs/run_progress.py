"""How far a run is: step, loss and time left, from its events."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from primus.runs.events import Event

WINDOW = 50
"""Steps over which the time of a step is averaged: enough to level out checkpoints and evaluations."""


class RunProgress(Struct, frozen=True, kw_only=True):
    """Progress of a training."""

    step: int
    total: int
    """Step at which it ends."""
    loss: float | None = None
    remaining_s: float | None = None
    """Expected time until the last step; None while it is unknown."""

    @property
    def percentage(self) -> int:
        """Finished part of all steps, 0 to 100."""
        return min(100, 100 * self.step // self.total) if self.total else 0


class ProgressTracker:
    """Follows the events of a run; `progress` is None until a step was taken."""

    def __init__(self) -> None:
        self.progress: RunProgress | None = None
        self._total = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        """Steps and the times of their events."""

    def observe_event(self, event: Event) -> None:
        """Take an event into account; those of other kinds change nothing."""
        kind = event["kind"]
        if kind == "run_started":
            self._total = event.get("train_iters") or 0
        if kind in ("run_started", "rewind"):
            self._recent.clear()  # the time between two attempts is no time of a step
        if kind != "step" or not isinstance(event.get("step"), int):
            return
        self._recent.append((event["step"], event["time"]))
        (first, began), (last, ended) = self._recent[0], self._recent[-1]
        remaining_s = (self._total - last) * (ended - began) / (last - first) if last > first else None
        loss = event.get("loss")
        self.progress = RunProgress(
            step=last,
            total=self._total,
            loss=loss if isinstance(loss, float | int) else None,
            remaining_s=None if remaining_s is None else max(0.0, remaining_s),
        )


def format_progress(progress: RunProgress) -> str:
    """``step 120/1000 (12 %), loss 2.345, 1:05:00 left``."""
    parts = [f"step {progress.step}/{progress.total} ({progress.percentage} %)"]
    parts += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
    if progress.remaining_s is not None:
        parts.append(f"{format_duration(progress.remaining_s)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: ``1:05:00``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"

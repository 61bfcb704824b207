"""Runs as a person watches them: state, progress, loss, speed, health and last lines, read from the run folders alone.

Any run folder will do: one that another host writes, one that waits in a queue, one that has ended. Nothing is written.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError, escape_controls
from primus.report import table
from primus.runs.events import Event, EventFollower
from primus.runs.run_metrics import RunMetrics
from primus.runs.run_progress import ProgressTracker, RunProgress, format_progress
from primus.runs.step_line import shorten_line
from primus.runs.store import Run
from primus.runs.summary import find_run_state

NUM_LOSSES = 4096
"""Losses that are kept for the curve; when there are more, every second one is."""
NUM_LINES = 3
TAIL_BYTES = 4096
CURVE_WIDTH = 40
BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
WAITING = ("planned", "running")
"""States in which a run has not ended."""
NEWS = {
    "hang": "hang: {problem}",
    "restart": "restart {attempt}: {reason}",
    "failure": "failure: {problem}",
    "rewind": "rewind to step {to_step}",
    "straggler": "straggler: rank {rank} on {host}",
    "checkpoint_failed": "{problem}",
    "checkpoint_rejected": "checkpoint {name} rejected: {reason}",
}
"""What is said of an event that bears on the health of a run."""


class RunView(Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    run: str
    name: str
    state: str
    """As in metadata.json; ``died`` if no process executes a run that has not ended."""
    reason: str = ""
    exit_code: int | None = None
    progress: RunProgress | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    memory_gib: float | None = None
    mfu: float | None = None
    validation_loss: float | None = None
    restarts: int = 0
    news: list[str] = []
    """Hangs, restarts and the like, the newest last."""
    losses: list[float] = []
    lines: list[str] = []
    """Last lines of the log of rank 0."""

    @property
    def has_ended(self) -> bool:
        return self.state not in WAITING


class WatchedRun:
    """Follows a run folder; each look reads only what is new."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._follower = EventFollower(run.events, from_start=True)
        self._tracker, self._metrics = ProgressTracker(), RunMetrics()
        self._losses: list[float] = []
        self._stride = 1
        self._news: deque[str] = deque(maxlen=NUM_LINES)
        self._validation_loss: float | None = None
        self._restarts = 0

    def look(self) -> RunView:
        """The run at this moment.

        Raises:
            PrimusError: Its folder is gone or damaged.
        """
        # Before the events: a run that has ended by now has written all of them.
        metadata = self.run.read_metadata()
        state = find_run_state(self.run, metadata)
        for event in self._follower.read_new_events():
            self._observe_event(event)
        step = self._metrics.last_step
        return RunView(
            run=self.run.id,
            name=metadata.name,
            state=state,
            reason=metadata.outcome.reason,
            exit_code=metadata.outcome.exit_code,
            progress=self._tracker.progress,
            **{name: step.get(name) for name in ("tokens_per_s", "step_time_s", "memory_gib", "mfu")},
            validation_loss=self._validation_loss,
            restarts=self._restarts,
            news=list(self._news),
            losses=list(self._losses),
            lines=read_last_lines(self.run.directory / "logs/rank_0.log"),
        )

    def _observe_event(self, event: Event) -> None:
        kind, loss = event["kind"], event.get("loss")
        self._metrics.observe_event(event)
        self._tracker.observe_event(event)
        if kind == "step" and isinstance(loss, int | float) and event.get("step", 0) % self._stride == 0:
            self._losses.append(float(loss))
            if len(self._losses) > NUM_LOSSES:
                self._losses, self._stride = self._losses[1::2], 2 * self._stride
        elif kind == "eval" and isinstance(loss, int | float):
            self._validation_loss = float(loss)
        self._restarts += kind == "restart"
        if kind in NEWS:
            with contextlib.suppress(KeyError):  # an event of another version, without this field
                self._news.append(NEWS[kind].format_map(event).partition("\n")[0])


def read_last_lines(path: Path) -> list[str]:
    """The last whole lines of a log that may be written; none if it is not there."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            whole = log.read().rpartition(b"\n")[0]
    except OSError:
        return []
    lines = [line.rpartition("\r")[2] or line for line in whole.decode(errors="replace").split("\n")]
    return [line for line in lines if line.strip()][-NUM_LINES:]


def format_view(view: RunView, width: int) -> list[str]:
    """The lines of a run on a page of `width` columns."""
    lines = [f"{view.name} {view.run}  {view.state.upper() if view.has_ended else view.state}"]
    if view.progress is not None:
        lines.append(f"  {format_progress(view.progress)}")
        lines += [f"  {line}" for line in _format_numbers(view, width - 2)]
    elif view.state == "planned":
        lines.append("  waits to be started")
    if view.losses:
        curve = draw_curve(view.losses, min(CURVE_WIDTH, width - 30))
        lines.append(f"  loss {view.losses[0]:.4g} {curve} {view.losses[-1]:.4g}")
    lines += [f"  ! {text}" for text in view.news]
    if view.has_ended and view.reason:
        lines.append(f"  {view.reason}")
    elif not view.has_ended:
        lines += [f"  | {shorten_line(line, width - 4)}" for line in view.lines]
    return [_cut(escape_controls(line), width) for line in lines]


def _format_numbers(view: RunView, width: int) -> list[str]:
    """Speed, memory and so on, in as many lines as they need."""
    parts = [
        f"{view.tokens_per_s:,.0f} tokens/s" if view.tokens_per_s else "",
        f"{view.step_time_s:.3g} s/step" if view.step_time_s else "",
        f"{view.memory_gib:.3g} GiB" if view.memory_gib else "",
        f"MFU {view.mfu:.1%}" if view.mfu else "",
        f"validation loss {view.validation_loss:.4g}" if view.validation_loss is not None else "",
        f"restarts {view.restarts}" if view.restarts else "",
    ]
    lines = [""]
    for part in filter(None, parts):
        lines[-1:] = [f"{lines[-1]}  {part}".strip()] if len(lines[-1]) + 2 + len(part) <= width else [lines[-1], part]
    return [line for line in lines if line]


def format_change(before: RunView | None, view: RunView) -> list[str]:
    """Lines of what is new since an earlier look, for a log or a script that reads along."""
    name = f"{view.name} {view.run}"
    lines = []
    if view.progress is not None and (before is None or view.progress != before.progress):
        rate = f", {view.tokens_per_s:,.0f} tokens/s" if view.tokens_per_s else ""
        lines.append(f"{format_progress(view.progress)}{rate}")
    known = before.news if before is not None else []
    overlap = next(n for n in range(len(view.news), -1, -1) if known[len(known) - n :] == view.news[:n])
    lines += view.news[overlap:]
    if before is None or before.state != view.state:
        reason = f": {view.reason}" if view.reason and view.has_ended else ""
        lines.append(f"{view.state}{reason}")
    return [f"{name}: {escape_controls(line)}" for line in lines]


def draw_curve(values: Sequence[float], width: int) -> str:
    """A curve in one line: the mean of each part of the values as a block, from the lowest to the highest."""
    width = max(1, min(width, len(values)))
    edges = [round(number * len(values) / width) for number in range(width + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def describe_missing(run: Run, error: PrimusError) -> RunView:
    """A run whose folder cannot be read any more."""
    return RunView(run=run.id, name=run.directory.parent.name, state="damaged", reason=error.problem, exit_code=1)


def format_time_of_day(now: float) -> str:
    """The clock of a page."""
    return table.format_time(now)[11:]

"""One launch of the user's job on this node, with the fault of its order."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus.drill import plant
from primus.drill.exchange import LaunchOrder, PlantReport
from primus.drill.fault_kinds import FaultPermissions
from primus.drill.plant import PlantedFault
from primus.errors import PrimusError
from primus.process import end_program, set_parent_death_signal
from primus.runs import events
from primus.runs.events import Event
from primus.runs.store import Run

LOOK_S = 0.5
"""Time between two looks at the files of a run."""
STOP_S = 30.0
"""Time that a launch has to save and end after a signal; nobody needs its checkpoint."""
WORKSPACE = "runs"
"""Folder of the runs of a launch, in that of its order."""

IsOver = Callable[[list[Event]], bool]
"""Decides by the events of a run whether node 0 ends the launch."""


class DrilledJob(Struct, frozen=True, kw_only=True):
    """What every launch of a drill starts."""

    runtime_words: tuple[str, ...]
    """Options of `direct`, as typed."""
    command: tuple[str, ...]
    """Task and options, as typed."""
    environ: Mapping[str, str]
    allowed: FaultPermissions


def find_run(place: str | Path) -> Run | None:
    """The run of an order; None if it has not been created."""
    folders = [path for path in (Path(place) / WORKSPACE).glob("*/*") if path.is_dir() and not path.is_symlink()]
    return Run(max(folders)) if folders else None


def read_run_events(place: str | Path) -> list[Event]:
    """The events of the run of an order so far."""
    run = find_run(place)
    return list(events.read_events(run.events)) if run else []


def run_launch(
    order: LaunchOrder, job: DrilledJob, node_rank: int, offset_s: float, is_over: IsOver | None
) -> tuple[int, PlantReport]:
    """Start the job on this node, plant the fault of the order if it is for this node, wait for the end.

    Args:
        order: What is started.
        job: The same for all orders.
        node_rank: Of this node.
        offset_s: Clock of node 0 minus that of this node.
        is_over: Decides on node 0 when the job is asked to save and end.

    Returns:
        The exit code, and what was planted.
    """
    Path(order.place).mkdir(parents=True, exist_ok=True)
    log = Path(order.place) / f"node_{node_rank}.log"
    with log.open("ab") as output:
        child = subprocess.Popen(
            _build_command(order, job),
            env=dict(job.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the drill, which ends the launch
            preexec_fn=set_parent_death_signal,
        )
    watch = _LaunchWatch(order, job, child, offset_s, is_target=order.target == node_rank)
    try:
        watch.wait(is_over)
    finally:
        if watch.fault is not None:
            watch.fault.undo()
        end_program(child)
    return child.returncode, watch.planted


def _build_command(order: LaunchOrder, job: DrilledJob) -> list[str]:
    # The options of launcher files are among the words of the runtime already.
    head = [sys.executable, "-m", "primus", "--no-config", "direct", *job.runtime_words, *order.options, "--"]
    # The only run in this workspace: the same command again resumes it, with its secrets.
    workspace = str(Path(order.place) / WORKSPACE)
    return [*head, *job.command, *order.words, "--auto_continue_train", "true", "--workspace", workspace]


class _LaunchWatch:
    """Watches a launch on this node, and plants its fault at the step of the order."""

    def __init__(
        self, order: LaunchOrder, job: DrilledJob, child: subprocess.Popen[bytes], offset_s: float, *, is_target: bool
    ) -> None:
        self.planted = PlantReport()
        self.fault: PlantedFault | None = None
        self._order, self._job, self._child, self._offset_s = order, job, child, offset_s
        self._is_pending = is_target and order.fault is not None

    def wait(self, is_over: IsOver | None) -> None:
        """Wait until the launch has ended; node 0 ends it once `is_over`."""
        deadline, look_at, is_asked = time.monotonic() + self._order.limit_s, 0.0, False
        while self._child.poll() is None:
            now = time.monotonic()
            if self.fault is not None:
                self.fault.tick()
            if now >= look_at:
                look_at = now + LOOK_S
                is_reading = is_over is not None or self._is_pending or self.fault is not None
                found = read_run_events(self._order.place) if is_reading else []
                self._plant_if_due(found)
                if is_over is not None and not is_asked and (is_over(found) or now >= deadline):
                    is_asked, deadline = True, now + STOP_S
                    self._undo_fault()  # a stopped rank could not save
                    self._child.send_signal(signal.SIGTERM)
                elif now >= deadline + (0 if is_asked else STOP_S):
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(plant.TICK_S)

    def _undo_fault(self) -> None:
        if self.fault is not None:
            self.fault.undo()

    def _plant_if_due(self, found: Sequence[Event]) -> None:
        if self._order.fault == "fill-disk" and self.fault and _has_failed_save(found):
            self.fault.undo()
        if not self._is_pending:
            return
        beats = plant.find_own_ranks(Path(self._order.place) / WORKSPACE, self._child.pid)
        # The last rank of another node, and the first of node 0: drills of one node have two targets then.
        rank = plant.choose_rank(beats, last=self._order.target > 0 or self._order.fault != "hang")
        # Heartbeats are written once a second; where this node sees the events, they are newer.
        last = max((each["step"] for each in found if each["kind"] == "step"), default=0)
        if rank is None or max(beats[rank].step, last) < self._order.after_step:
            return
        if found and not any(each["kind"] == "checkpoint_saved" for each in found):
            return  # the checkpoint from which the run should resume is still being written
        self._is_pending = False
        assert self._order.fault
        step = max(beats[rank].step, last)
        planted_at = time.time() + self._offset_s
        try:
            self.fault = plant.plant_fault(self._order.fault, beats[rank], self._child, self._job.allowed)
        except (PrimusError, OSError) as error:
            self.planted = PlantReport(problem=error.problem if isinstance(error, PrimusError) else str(error))
            return
        self.planted = PlantReport(planted_at=planted_at, step=step, rank=rank)


def _has_failed_save(found: Sequence[Event]) -> bool:
    return any(each["kind"] == "checkpoint_failed" for each in found)

"""Plant one fault in a launch that this process has started, and undo it.

A fault may last: `tick` is called every `TICK_S` until the launch ends, `undo` always follows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from primus.drill.fault_kinds import FaultName, FaultPermissions, choose_stopped_factor, find_slow_time_s
from primus.drill.guard import FaultGuard, FaultUndo, read_start_time
from primus.errors import PrimusError
from primus.launch.nodes.control_channel import HEARTBEAT_TIMEOUT_S
from primus.launch.supervision.heartbeats import RankHeartbeat
from primus.process import end_program
from primus.runs.attempt import process_state

TICK_S = 0.05
LEAST_RUNNING_S, MOST_RUNNING_S = 0.005, 0.05
"""Limits of the time for which a slow rank runs in each turn. It is a quarter of what the rank computes in a step, so
that every step is interrupted."""
DROPPED_S = HEARTBEAT_TIMEOUT_S + 15.0
"""Time for which a node has no network: until it counts as lost, and until all nodes have ended their ranks."""
FULL_S = 120.0
"""Time for which a disk stays full, unless the failed checkpoint is seen earlier."""
BALLAST = "primus-drill-ballast"
"""File that fills a disk."""


class PlantedFault:
    """A fault from its planting on.

    Args:
        lasts_s: Time after which it is undone; 0 for one that needs no undo.
        guard: Undoes it.
        cycle: Ended before that.
    """

    def __init__(self, lasts_s: float = 0.0, guard: FaultGuard | None = None, cycle: DutyCycle | None = None) -> None:
        self._until, self._guard, self._cycle = time.monotonic() + lasts_s, guard, cycle

    def tick(self) -> None:
        """Undo the fault when its time is over."""
        if time.monotonic() >= self._until:
            self.undo()

    def undo(self) -> None:
        """Undo the fault, if that was not done."""
        if self._cycle is not None:
            self._cycle.end()
            self._cycle = None
        if self._guard is not None:
            self._guard.release()
            self._guard = None


def find_own_ranks(workspace: Path, launcher: int) -> dict[int, RankHeartbeat]:
    """The ranks of the newest attempt below `workspace` that the process `launcher` has started and that are alive."""
    found: dict[int, tuple[int, RankHeartbeat]] = {}
    for path in workspace.glob("*/*/logs/attempt_*/rank_*.heartbeat.json"):
        # A rank may replace the file while it is read.
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            beat = msgspec.json.decode(path.read_bytes(), type=RankHeartbeat)
            rank, attempt = int(path.name.split("_")[1].partition(".")[0]), int(path.parent.name.split("_")[1])
            is_newer = rank not in found or attempt >= found[rank][0]
            if is_newer and beat.launcher == launcher and _is_started_by(beat.pid, launcher):
                found[rank] = attempt, beat
    return {rank: beat for rank, (_, beat) in found.items()}


def _is_started_by(pid: int, launcher: int) -> bool:
    """Whether a process is alive, and was started by `launcher`: nothing else may be disturbed."""
    with contextlib.suppress(psutil.Error):
        return bool(process_state(pid)) and any(each.pid == launcher for each in psutil.Process(pid).parents())
    return False


def plant_fault(
    name: FaultName, beat: RankHeartbeat, child: subprocess.Popen[bytes], allowed: FaultPermissions
) -> PlantedFault:
    """Plant a fault now.

    Args:
        name: Of the fault.
        beat: Heartbeat of the rank, which `child` has started.
        child: The launcher of this node, which leads a session.
        allowed: What else may be disturbed.

    Raises:
        PrimusError: It cannot be planted.
    """
    if name == "kill-rank":
        os.kill(beat.pid, signal.SIGKILL)
        return PlantedFault()
    if name == "kill-node":
        end_program(child)
        return PlantedFault()
    if name == "fill-disk":
        return _fill_disk(Path(allowed.fill))
    if name == "drop-network":
        return _drop_network(allowed.interface)
    guard = _start_guard(FaultUndo(pid=beat.pid, started=read_start_time(beat.pid)))
    if name == "slow-rank":
        step_s = beat.compute_time_s or 0.0
        running_s = min(MOST_RUNNING_S, max(LEAST_RUNNING_S, step_s / 4))
        cycle = DutyCycle(beat.pid, running_s, choose_stopped_factor(step_s) * running_s)
        return PlantedFault(lasts_s=find_slow_time_s(step_s), guard=guard, cycle=cycle)
    os.kill(beat.pid, signal.SIGSTOP)
    return PlantedFault(lasts_s=float("inf"), guard=guard)


def _start_guard(undo: FaultUndo) -> FaultGuard:
    guard = FaultGuard(undo)
    if not guard.is_ready:
        guard.release()
        raise PrimusError("the process that undoes the fault did not start")
    return guard


class DutyCycle:
    """A thread that stops and continues a process in turn until its end."""

    def __init__(self, pid: int, running_s: float, stopped_s: float) -> None:
        self._pid, self._running_s, self._stopped_s, self._ended = pid, running_s, stopped_s, threading.Event()
        self._thread = threading.Thread(target=self._alternate, name="duty-cycle", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop alternating; the process may be stopped then."""
        self._ended.set()
        self._thread.join()

    def _alternate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            while not self._ended.is_set():
                os.kill(self._pid, signal.SIGSTOP)
                self._ended.wait(self._stopped_s)
                os.kill(self._pid, signal.SIGCONT)
                self._ended.wait(self._running_s)


def _fill_disk(folder: Path) -> PlantedFault:
    path = folder / BALLAST
    guard = _start_guard(FaultUndo(file=str(path)))
    try:
        write_until_full(path)
    except OSError as error:
        guard.release()
        raise PrimusError(f"{folder} cannot be filled: {error.strerror or error}") from None
    return PlantedFault(lasts_s=FULL_S, guard=guard)


def write_until_full(path: Path) -> None:
    """Write a file that takes all space of its file system.

    Raises:
        OSError: It cannot be created.
    """
    with path.open("wb", buffering=0) as file:
        for size in (1 << 24, 1 << 16, 1 << 8):  # smaller pieces fill what a larger one did not
            with contextlib.suppress(OSError):  # the disk, or the quota, is full
                while file.write(bytes(size)) == size:
                    pass


def _drop_network(interface: str) -> PlantedFault:
    listing = subprocess.run(
        ["ip", "route", "show", "dev", interface], capture_output=True, text=True, check=False, timeout=10
    )
    routes = tuple(line.strip() for line in listing.stdout.splitlines() if line.strip())
    guard = _start_guard(FaultUndo(interface=interface, routes=routes))
    down = ["ip", "link", "set", "dev", interface, "down"]
    done = subprocess.run(down, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode:
        guard.release()
        raise PrimusError(f"{interface} cannot be taken down: {done.stderr.strip()}")
    return PlantedFault(lasts_s=DROPPED_S, guard=guard)


def choose_rank(found: Mapping[int, RankHeartbeat], *, last: bool) -> int | None:
    """The rank of this node at which a fault is planted; None if none is training."""
    training = sorted(rank for rank, beat in found.items() if beat.phase == "train")
    return (training[-1] if last else training[0]) if training else None

"""A running attempt as seen by one rank: its output, records and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

from primus.errors import FinalError, PrimusError, did_you_mean
from primus.machine.cluster import find_node_name
from primus.runs.events import EventLog
from primus.runs.files import write_json
from primus.runs.store import RankFailure, Run

HEARTBEAT_INTERVAL_S = 1.0
LAUNCHER_VARIABLE = "PRIMUS_LAUNCHER_PID"
"""Variable with the launcher's process id for its workers, which may be children of an agent."""
INSISTS_AFTER_S = 3.0
"""A signal that is repeated after this time ends a worker; before, it is the same request from scheduler and
launcher."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a worker to save and exit; SIGUSR1 is the warning before a time limit or a preemption."""
PHASES = ("init", "data", "compile", "train", "rollout", "eval", "test", "checkpoint", "profile", "exit")
"""Activities that a worker reports; the hang timeout depends on them."""


class RankPlace(NamedTuple):
    """Place of a worker among those of its job."""

    rank: int = 0
    local_rank: int = 0
    """On its node."""
    world_size: int = 1


SINGLE_RANK = RankPlace()


class Attempt:
    """The context of a worker: its run, its ranks, and its channels to the launcher and the user.

    Args:
        run: The run folder.
        number: Which attempt of the run this is, from 0.
        place: Which worker this is.
        console: Output of rank 0 for the user; None without a console.
    """

    def __init__(
        self,
        run: Run,
        number: int,
        place: RankPlace = SINGLE_RANK,
        console: TextIO | None = None,
        *,
        handles_signals: bool = False,
    ) -> None:
        self.run = run
        self.number = number
        self.rank, self.local_rank, self.world_size = place
        self.console = console if self.rank == 0 else None
        self.folder = run.attempt_folder(number)
        self.stop_signal: str | None = None
        """Name of the signal that asked the worker to stop; the trainer reads it between steps."""
        self._stops_at_once = False
        self._events = EventLog(run.events) if self.rank == 0 else None
        self._asked_at: dict[int, float] = {}
        # From the first heartbeat on the launcher knows the process id, and any signal of it must find a handler.
        if handles_signals:
            self.listen_for_signals()
        self._heartbeat = HeartbeatWriter(heartbeat_file(self.folder, self.rank), self.local_rank)

    def say(self, text: str, shown: str | None = None) -> None:
        """Print a human-readable line: rank 0 on the console, as `shown` if given, every rank in its own log."""
        with contextlib.suppress(OSError):  # a full disk; Python keeps the text for the next line
            print(text, flush=True)
        if self.console is not None:
            try:
                print(text if shown is None else shown, file=self.console, flush=True)
            except OSError:  # the reader of the console has exited; the log remains
                self.console = None

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl, on rank 0."""
        if self._events is not None:
            self._events.append(kind, **fields)

    def beat(self, phase: str, step: int = 0, timings: Mapping[str, float] | None = None) -> None:
        """Record progress.

        Args:
            phase: Current activity of the rank, one of `PHASES`.
            step: Last step that it has finished.
            timings: Of that step: `step_time_s`, and `compute_time_s`, the rank's own computing without waiting for
                others, by which ranks can be compared.

        Raises:
            FinalError: The phase is unknown.
        """
        if phase not in PHASES:
            raise FinalError(f"beat: unknown phase '{phase}'", did_you_mean(phase, PHASES))
        self._heartbeat.set(phase, step, timings)

    def listen_for_signals(self) -> None:
        """Record the first signal of `STOPPING` in `stop_signal`; a repeated SIGTERM or SIGINT ends the process."""
        for number in STOPPING:
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def stop_at_once(self) -> Iterator[None]:
        """Raise PrimusError in the body as soon as a signal asks the worker to stop, between two bytecodes."""
        self._stops_at_once = True
        try:
            self.raise_if_stopped()
            yield
        finally:
            self._stops_at_once = False

    def raise_if_stopped(self) -> None:
        """Raise PrimusError if a signal has asked the worker to stop."""
        if self.stop_signal:
            raise PrimusError(f"interrupted by {self.stop_signal}", "the results so far are in the run folder")

    def record_failure(self, error: BaseException, exit_code: int) -> None:
        """Write the reason to the file in which the launcher looks for the first failing rank."""
        problem = error.problem if isinstance(error, PrimusError) else f"{type(error).__name__}: {error}"
        failure = RankFailure(
            rank=self.rank,
            host=find_node_name(),
            time=time.time(),
            problem=problem,
            hint=error.hint if isinstance(error, PrimusError) else "",
            log=str(self.log.relative_to(self.run.directory)),
            exit_code=exit_code,
            action="stop" if isinstance(error, FinalError) else "retry",
        )
        write_json(self.folder / f"rank_{self.rank}.error.json", failure)

    @property
    def log(self) -> Path:
        return self.folder / f"rank_{self.rank}.log"

    def close(self) -> None:
        self._heartbeat.close()
        if self._events is not None:
            self._events.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # Runs in the main thread between two bytecodes, and only sets attributes, except in the body of
        # `stop_at_once`: the trainer saves when it reads `stop_signal`.
        insists = now - self._asked_at.setdefault(number, now) > INSISTS_AFTER_S
        if insists and number != signal.SIGUSR1:
            # The default action gives the exit status of a killed process, which a handler cannot produce.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stop_signal = self.stop_signal or signal.Signals(number).name
        if self._stops_at_once:
            self.raise_if_stopped()


def write_stacks_when_asked(folder: Path, rank: int) -> None:
    """Have SIGUSR2 write the stacks of all threads. faulthandler needs no bytecode to run, so this works in a hang."""
    import faulthandler

    with contextlib.suppress(OSError):  # a full disk: stacks are optional, so the worker continues
        file = stacks_file(folder, rank).open("a")  # stays open until the process exits
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def forget_stacks(folder: Path, rank: int) -> None:
    """Delete the file if no stacks were requested."""
    with contextlib.suppress(OSError):
        file = stacks_file(folder, rank)
        if file.stat().st_size == 0:
            file.unlink()


def heartbeat_file(folder: Path, rank: int | str) -> Path:
    """Heartbeat file of a rank, in the folder of the attempt; rank `*` gives the pattern of all."""
    return folder / f"rank_{rank}.heartbeat.json"


def stacks_file(folder: Path, rank: int) -> Path:
    """File for the stacks of a rank, in the folder of the attempt."""
    return folder / f"rank_{rank}.stacks.txt"


class HeartbeatWriter:
    """Replaces one small file from a thread, while its process lives: periodically, and when the phase changes.

    The thread also ends the process when its parent or its launcher has died, so that no worker outlives them.

    Args:
        path: The file.
        local_rank: Of the process on its node.
        interval_s: Time between two heartbeats.
    """

    def __init__(self, path: Path, local_rank: int = 0, interval_s: float = HEARTBEAT_INTERVAL_S) -> None:
        self._path = path
        self._local_rank = local_rank
        self._interval_s = interval_s
        self._state: dict[str, Any] = {"phase": "init", "step": 0, "progress_time": time.time()}
        self._timings: Mapping[str, float] = {}
        self._is_closed = False
        self._wake = threading.Event()
        self._parent = os.getppid()
        # The parent may be the elastic agent, which can outlive the launcher for a while. Both are watched.
        self._launcher = int(os.environ.get(LAUNCHER_VARIABLE, self._parent))
        self._thread = threading.Thread(target=self._write_periodically, name="heartbeat", daemon=True)
        self._write_heartbeat()
        self._thread.start()

    def set(self, phase: str, step: int, timings: Mapping[str, float] | None = None) -> None:
        # Replaced as a whole while the thread runs: it may read the state at any time without a lock.
        kept = timings if timings is not None else self._timings
        self._timings = kept
        is_other_phase = phase != self._state["phase"]
        self._state = {"phase": phase, "step": step, "progress_time": time.time(), **kept}
        if is_other_phase:
            # Limits depend on the phase: a process that is stopped now must not keep that of the phase before.
            self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        # Bounded: a stalled file system must not keep a finished rank from exiting.
        self._thread.join(timeout=5)
        # The last phase distinguishes a rank that ended from one whose heartbeats stopped.
        self._state["phase"] = "exit"
        self._write_heartbeat()

    def _write_periodically(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if self._is_closed:
                return
            # SIGKILL, because a handler of another signal would not run while the main thread waits in a collective.
            if os.getppid() != self._parent or not process_state(self._launcher):
                os.kill(os.getpid(), signal.SIGKILL)
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        state = {
            "pid": os.getpid(),
            "launcher": self._launcher,
            "host": find_node_name(),
            "local_rank": self._local_rank,
            "time": time.time(),
            **self._state,
        }
        try:
            write_json(self._path, state)
        except PrimusError as error:  # a full disk must not end the training that could still free it
            print(f"heartbeat: {error.problem}", file=sys.stderr)


def process_state(pid: int) -> str:
    """State of a process in proc(5), such as R, S, or T if it is stopped; empty if it has ended."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as file:
            found = file.read().rpartition(b")")[2].split()[0].decode()
    except ProcessLookupError:
        return ""
    except FileNotFoundError:
        return "" if os.path.isdir("/proc/self") else "S"
    except OSError:  # a process of another user
        return "S"
    return "" if found in "ZX" else found  # a zombie has ended, although its parent has not waited for it yet

"""One rank's side of a running attempt: what it says, records and hears."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from primus.errors import FinalError, PrimusError
from primus.runs.events import EventLog
from primus.runs.files import write_json
from primus.runs.store import RankFailure, Run

HEARTBEAT_INTERVAL_S = 1.0
LAUNCHER_VARIABLE = "PRIMUS_LAUNCHER_PID"
"""Variable by which a launcher tells its workers who it is; an agent may stand between them."""
INSISTS_AFTER_S = 3.0
"""A signal that comes again later than this ends a worker; sooner, a scheduler and the launcher both send it."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a worker to save and end; SIGUSR1 announces a time limit or a preemption."""


class Attempt:
    """What a worker is given: its run, its place among the ranks, and its channels to the outside.

    Args:
        run: The run folder.
        number: Which attempt of the run this is, from 0.
        rank: Global rank, `local_rank` on this node, of `world_size`.
        console: Where rank 0 speaks to people; None where nobody listens.
    """

    def __init__(
        self, run: Run, number: int, rank: int, local_rank: int, world_size: int, console: TextIO | None
    ) -> None:
        self.run = run
        self.number = number
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.console = console if rank == 0 else None
        self.folder = run.attempt_folder(number)
        self.stop_signal: str | None = None
        """Name of the signal that asked the worker to stop; the trainer looks between steps."""
        self._events = EventLog(run.events) if rank == 0 else None
        self._asked_at: dict[int, float] = {}
        self._heartbeat = HeartbeatWriter(heartbeat_file(self.folder, rank), local_rank)

    def say(self, text: str) -> None:
        """Print a line for people: rank 0 on the console, every rank in its own log."""
        print(text, flush=True)
        if self.console is not None:
            try:
                print(text, file=self.console, flush=True)
            except OSError:  # the reader of the console has gone; the log remains
                self.console = None

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl, on rank 0."""
        if self._events is not None:
            self._events.append(kind, **fields)

    def beat(self, phase: str, step: int = 0, timings: Mapping[str, float] | None = None) -> None:
        """Record progress; phases are init, data, compile, train, eval, test, checkpoint and exit.

        Args:
            phase: What the rank does now.
            step: Last step that it has finished.
            timings: Of that step: `step_time_s`, and `compute_time_s`, the rank's own computing without waiting for
                others, by which ranks can be compared.
        """
        self._heartbeat.set(phase, step, timings)

    def listen_for_signals(self) -> None:
        """Note the first signal of `STOPPING` in `stop_signal`; SIGTERM or SIGINT that comes again later ends."""
        for number in STOPPING:
            signal.signal(number, self._on_signal)

    def record_failure(self, error: BaseException, exit_code: int) -> None:
        """Leave the reason where the launcher looks for the first failing rank."""
        problem = error.problem if isinstance(error, PrimusError) else f"{type(error).__name__}: {error}"
        failure = RankFailure(
            rank=self.rank,
            host=socket.gethostname(),
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
        insists = now - self._asked_at.setdefault(number, now) > INSISTS_AFTER_S
        if insists and number != signal.SIGUSR1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stop_signal = self.stop_signal or signal.Signals(number).name


def write_stacks_when_asked(folder: Path, rank: int) -> None:
    """Have SIGUSR2 write the stacks of all threads of this process: whatever it does then, the interpreter answers."""
    import faulthandler

    with contextlib.suppress(OSError):  # a full disk: what can be done without is not what the worker fails of
        file = stacks_file(folder, rank).open("a")  # stays open as long as the process
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def forget_stacks(folder: Path, rank: int) -> None:
    """Leave no empty file behind where nobody asked."""
    with contextlib.suppress(OSError):
        file = stacks_file(folder, rank)
        if file.stat().st_size == 0:
            file.unlink()


def heartbeat_file(folder: Path, rank: int | str) -> Path:
    """Where a rank says that it lives, in the folder of the attempt; `*` for the pattern of all."""
    return folder / f"rank_{rank}.heartbeat.json"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where the stacks of a rank are written, in the folder of the attempt."""
    return folder / f"rank_{rank}.stacks.txt"


class HeartbeatWriter:
    """Replaces one small file at most once a second, from a thread, while its process lives.

    The thread also ends the process when its parent or its launcher has died, so that no worker outlives them.
    """

    def __init__(self, path: Path, local_rank: int = 0) -> None:
        self._path = path
        self._local_rank = local_rank
        self._state: dict[str, Any] = {"phase": "init", "step": 0, "progress_time": time.time()}
        self._timings: Mapping[str, float] = {}
        self._closed = threading.Event()
        self._parent = os.getppid()
        self._launcher = int(os.environ.get(LAUNCHER_VARIABLE, self._parent))
        self._thread = threading.Thread(target=self._write_periodically, name="heartbeat", daemon=True)
        self._write_heartbeat()
        self._thread.start()

    def set(self, phase: str, step: int, timings: Mapping[str, float] | None = None) -> None:
        kept = timings if timings is not None else self._timings
        self._timings = kept
        self._state = {"phase": phase, "step": step, "progress_time": time.time(), **kept}

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)
        self._state["phase"] = "exit"
        self._write_heartbeat()

    def _write_periodically(self) -> None:
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            if os.getppid() != self._parent or not process_state(self._launcher):
                os.kill(os.getpid(), signal.SIGKILL)
            self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        state = {
            "pid": os.getpid(),
            "launcher": self._launcher,
            "host": socket.gethostname(),
            "local_rank": self._local_rank,
            "time": time.time(),
            **self._state,
        }
        try:
            write_json(self._path, state)
        except PrimusError as error:  # a full disk must not end the training that could still free it
            print(f"heartbeat: {error.problem}", file=sys.stderr)


def process_state(pid: int) -> str:
    """State of a process as the kernel says it, such as R, S, or T where it is stopped; empty where it has ended."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", "rb") as file:
            found = file.read().rpartition(b")")[2].split()[0].decode()
    except ProcessLookupError:
        return ""
    except FileNotFoundError:
        return "" if os.path.isdir("/proc/self") else "S"
    except OSError:  # somebody else's process
        return "S"
    return "" if found in "ZX" else found  # a zombie has ended, though nobody has waited for it yet

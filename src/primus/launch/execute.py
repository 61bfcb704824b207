"""The only actor: performs a plan on this node, supervises its processes and says how they ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from primus import process
from primus.errors import EXIT_FAILED, PrimusError, UnfitError
from primus.launch.plan import LaunchPlan
from primus.runs import events
from primus.runs.attempt import LAUNCHER_VARIABLE
from primus.runs.files import write_json, write_text
from primus.runs.store import Failure, Outcome, Run

POLL_S = 0.05
TORCHRUN = "torch.distributed.run"
OF_ONE_RANK = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that torchrun sets for each of several workers; those of a launcher around us mislead a single one."""
GRACE_S = 60.0
"""Time that workers have for a last checkpoint after the first signal."""
FAILED_PEERS_S = 10.0
"""Time that the other ranks have to end after one has failed."""


def execute(
    plan: LaunchPlan, run: Run, number: int, environ: Mapping[str, str], after_start: Callable[[], None]
) -> Outcome:
    """Start the plan's processes as attempt `number` of `run` and wait for their end.

    Args:
        after_start: Called once the processes are starting, for work that need not delay them.

    Raises:
        PrimusError: The processes cannot be started.
    """
    folder = run.attempt(number)
    folder.mkdir(parents=True, exist_ok=True)
    _link_logs(run, plan, number)
    for path, text in plan.files.items():
        write_text(Path(path), text)
    with Signals() as signals:
        child = _start(plan, run, environ)
        try:
            after_start()
            _wait(child, signals, folder)
        finally:
            if child.poll() is None:
                process.end(child)
    return _outcome(child.returncode, signals.first, run, plan, number)


def _start(plan: LaunchPlan, run: Run, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Standard output stays ours for rank 0; standard error, where only engines speak, goes to launch.log."""
    if TORCHRUN in plan.argv and importlib.util.find_spec("torch") is None:
        raise UnfitError(
            "several processes are started by torchrun, which comes with PyTorch",
            "./primus-cli setup installs it, or pip install '.[native]' in a checkout",
        )
    env = dict(environ) | {name: variable.value for name, variable in plan.env.items()}
    for name in OF_ONE_RANK:
        env.pop(name, None)
    env[LAUNCHER_VARIABLE] = str(os.getpid())
    with launch_log(run, plan).open("ab") as log:
        try:
            return subprocess.Popen(
                plan.argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise PrimusError(f"{plan.argv[0]}: cannot be started: {error.strerror}") from None


def launch_log(run: Run, plan: LaunchPlan) -> Path:
    """Where the launcher of this node, and its engine, speak; nodes may share the folder."""
    node = plan.layout.node_rank if plan.layout else 0
    return run.directory / "logs" / (f"launch.node_{node}.log" if node else "launch.log")


def _die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies (prctl(2), PR_SET_PDEATHSIG).

    Nothing may linger: the same command may be typed again at once, and continue the run.
    """
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _link_logs(run: Run, plan: LaunchPlan, number: int) -> None:
    """Point logs/rank_N.log of this node's ranks to the newest attempt's."""
    shape = plan.layout
    first, count = (shape.node_rank * shape.nproc, shape.nproc) if shape else (0, 1)
    for rank in range(first, first + count):
        link = run.directory / "logs" / f"rank_{rank}.log"
        temporary = link.with_name(f".{link.name}.tmp.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(f"attempt_{number}/rank_{rank}.log")
        os.replace(temporary, link)


class Signals:
    """Counts the signals that ask us to stop, while workers run."""

    HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0

    def __enter__(self) -> Signals:
        is_main = threading.current_thread() is threading.main_thread()
        heard = [number for number in self.HANDLED if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup wants
        self._before = {number: signal.signal(number, self._note) for number in heard} if is_main else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1


def _wait(child: subprocess.Popen[bytes], signals: Signals, folder: Path) -> None:
    """Wait for the child; pass a signal on to the workers first, and end everything when time is up."""
    told_at: float | None = None
    failed_at: float | None = None
    while child.poll() is None:
        now = time.monotonic()
        if signals.count and told_at is None:
            told_at = now
            _tell_workers(child, folder)
        if signals.count > 1 or (told_at and now - told_at > GRACE_S):
            return
        if failed_at is None and _errors(folder):
            failed_at = now
        if failed_at and now - failed_at > FAILED_PEERS_S:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)


def _tell_workers(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Ask the workers of this node to save and end; their agent, where there is one, sees them finish."""
    workers = list(_worker_pids(folder))
    for pid in workers or [child.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _worker_pids(folder: Path) -> Iterator[int]:
    host = socket.gethostname()
    for path in folder.glob("rank_*.heartbeat.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            beat = msgspec.json.decode(path.read_bytes())
            if beat["host"] == host and beat["phase"] != "exit":
                yield beat["pid"]


def _errors(folder: Path) -> list[Failure]:
    """What the ranks of an attempt say of their failure, the first one first."""
    found = []
    for path in folder.glob("rank_*.error.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Failure))
    return sorted(found, key=lambda failure: (failure.time, failure.rank))


def _outcome(returncode: int, signalled: int | None, run: Run, plan: LaunchPlan, number: int) -> Outcome:
    errors = _errors(run.attempt(number))
    if signalled is not None:
        name = signal.Signals(signalled).name
        return Outcome(state="interrupted", exit_code=128 + signalled, reason=f"{name}; {_last_save(run)}")
    stopped = _interruption(run, number)
    if returncode == 0 and stopped is not None:
        code = 128 + getattr(signal, stopped, signal.SIGTERM)  # a signal to another rank has no name here
        return Outcome(state="interrupted", exit_code=code, reason=f"{stopped} to the workers; {_last_save(run)}")
    if returncode == 0:
        return Outcome(state="done", exit_code=0)
    failure = errors[0] if errors else _silent_death(returncode, run, plan, number)
    if not errors:  # the launchers of other nodes look here too
        write_json(run.attempt(number) / f"rank_{failure.rank}.error.json", failure)
    return Outcome(state="failed", exit_code=failure.exit_code, reason=failure.problem, first_failure=failure)


def _last_save(run: Run) -> str:
    saved = [event["step"] for event in events.read(run.events) if event["kind"] == "checkpoint_saved"]
    return f"saved at step {saved[-1]}" if saved else "nothing was saved"


def _interruption(run: Run, number: int) -> str | None:
    """Signal that the trainer says it stopped for, where that was the last thing it did."""
    last = None
    for event in events.read(run.events):
        if event["kind"] in ("interrupted", "run_started"):
            last = event
    is_this = last is not None and last["kind"] == "interrupted" and last.get("attempt", number) == number
    return last.get("signal", "SIGTERM") if last is not None and is_this else None


_DEAD_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")


def _silent_death(returncode: int, run: Run, plan: LaunchPlan, number: int) -> Failure:
    """The failure of a rank that could not say why: it was killed, or did not even begin."""
    rank, code = (plan.layout.node_rank * plan.layout.nproc if plan.layout else 0), returncode
    text = launch_log(run, plan).read_text(encoding="utf-8", errors="replace")
    dead = _DEAD_RANK.findall(text.rpartition(f"] attempt {number} on ")[2])
    if dead:
        code, rank = int(dead[-1][0]), rank + int(dead[-1][1])
    log = f"logs/attempt_{number}/rank_{rank}.log"
    if code >= 0:
        problem, hint = f"rank {rank} ended with exit code {code} and no message", "its log has the reason"
        log = log if (run.directory / log).exists() else "logs/launch.log"
    else:
        name = signal.Signals(-code).name
        problem = f"rank {rank} was killed by {name}"
        hint = "the kernel may have run out of memory: see dmesg" if name == "SIGKILL" else "its log may say more"
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        time=time.time(),
        problem=problem,
        hint=hint,
        log=log,
        exit_code=EXIT_FAILED if code >= 0 else 128 - code,
    )

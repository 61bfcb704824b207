"""Run programs without leaving orphans: with a time limit, or stopped with all their processes; and exit this
process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from msgspec import Struct

if TYPE_CHECKING:
    import subprocess

    import psutil

POLL_S = 0.01
KILL_S = 2.0
"""Time to wait for killed processes; a process in uninterruptible sleep may take longer."""


class CommandResult(Struct, frozen=True, kw_only=True):
    """Result of a program."""

    state: Literal["ok", "missing", "failed", "slow"]
    """`slow`: it was killed at the limit."""
    text: str = ""
    """Standard output."""
    problem: str = ""
    """Reason of a failure: the last line of standard error, or the exit code."""
    duration_s: float = 0.0


def count_usable_cpus() -> int:
    """Number of CPUs that this process may use; all on systems without CPU affinity, such as macOS."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_core_wait(threads: Path = Path("/proc/self/task")) -> float | None:
    """Share of the time in which threads of this process could run that they waited for a core.

    Since they began, from the times on a core and in a run queue (Linux, Documentation/scheduler/sched-stats.rst); None
    where the kernel does not count them.
    """
    ran = waited = 0
    for path in threads.glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            ran_ns, waited_ns, _ = map(int, path.read_text(encoding="ascii").split())
            ran, waited = ran + ran_ns, waited + waited_ns
    return waited / (ran + waited) if ran else None


def read_output(argv: Sequence[str], timeout_s: float = 5.0, cwd: Path | None = None) -> str | None:
    """Standard output of a command without its last newline; None if it is missing, fails or times out."""
    answer = run_command(argv, limit_s=timeout_s, cwd=cwd)
    return answer.text.rstrip("\n") if answer.state == "ok" else None


def set_parent_death_signal(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when the thread that started it dies (prctl(2)); only on Linux.

    For `preexec_fn`: the setting survives exec, unless the program is set-user-ID.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def run_command(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    limit_s: float = 5.0,
    cwd: Path | None = None,
    *,
    ends_with_caller: bool = False,
) -> CommandResult:
    """Run the program `argv`; it and all processes it started are killed at the limit, or when it has ended.

    Args:
        argv: The program and its arguments.
        environ: Its environment, with the PATH for the search; None for that of this process.
        limit_s: Time limit.
        cwd: Its working folder; None for that of this process.
        ends_with_caller: Whether the kernel kills it if this process is killed; costs a fork.
    """
    import shutil  # these take 5 ms, and a command that only plans runs no program
    import subprocess

    program = shutil.which(argv[0], path=None if environ is None else environ.get("PATH", os.defpath))
    if program is None:
        return CommandResult(state="missing", problem=f"{argv[0]} is not installed")
    began = time.monotonic()
    try:
        prepare = set_parent_death_signal if ends_with_caller else None
        child = _start_program([program, *argv[1:]], environ, cwd, prepare)
    except OSError as error:
        return CommandResult(state="failed", problem=f"{argv[0]}: {error.strerror}")
    with child:
        try:
            text, complaint = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            problem = f"{argv[0]} gave no response in {limit_s:g} s"
            return CommandResult(state="slow", problem=problem, duration_s=limit_s)
        finally:
            end_program(child)
            for pipe in (child.stdout, child.stderr):  # which another process may keep open
                if pipe is not None:
                    pipe.close()
            _running.discard(child.pid)
    duration_s = time.monotonic() - began
    if not child.returncode:
        return CommandResult(state="ok", text=text, duration_s=duration_s)
    message = (complaint.strip() or text.strip()).rpartition("\n")[2]
    problem = message or f"{argv[0]} exited with code {child.returncode}"
    return CommandResult(state="failed", text=text, problem=problem[:200], duration_s=duration_s)


_running: set[int] = set()
"""Process ids of running programs, to be killed at exit; a thread that started one may not be joined then."""
_starting = threading.Lock()
"""Held while a program is started and recorded, so that none is missed at exit."""


def _start_program(
    argv: Sequence[str],
    environ: Mapping[str, str] | None,
    cwd: Path | None,
    prepare: Callable[[], None] | None,
) -> subprocess.Popen[str]:
    import subprocess

    with _starting:
        child = subprocess.Popen(
            argv,
            env=None if environ is None else dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=prepare,
        )
        _running.add(child.pid)
    return child


@atexit.register
def _kill_running() -> None:
    _starting.acquire(timeout=KILL_S)  # never released, so that no further program is started
    for pid in list(_running):
        with contextlib.suppress(ProcessLookupError):
            # The group, because each program leads its own session, and so its own group.
            os.killpg(pid, signal.SIGKILL)


def end_program(child: subprocess.Popen[Any], patience_s: float = 0.0, mark: str = "") -> None:
    """Stop a program that leads a session, and all remaining processes that it started.

    Args:
        child: The program; it may have ended.
        patience_s: Time between SIGTERM and SIGKILL; with 0 they are killed at once.
        mark: ``NAME=VALUE`` in the environment of the program, which also finds processes that have left its session.
    """
    if child.poll() is not None and not mark and not any(_list_session(child.pid)):
        return
    found: dict[int, psutil.Process] = {}
    asked = [(signal.SIGTERM, patience_s)] if patience_s else []
    for number, limit_s in (*asked, (signal.SIGKILL, KILL_S)):
        # Listed again before SIGKILL: a process may have started others after SIGTERM.
        found |= {process.pid: process for process in _find_started_processes(child, mark)}
        for process in found.values():
            _send_signal(process, number)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and (child.poll() is None or any(map(_is_alive, found.values()))):
            time.sleep(POLL_S)
    child.wait()


def _find_started_processes(child: subprocess.Popen[Any], mark: str) -> list[psutil.Process]:
    """The program, its descendants, its session, and all processes with its mark."""
    import psutil  # takes 20 ms, and is rarely needed

    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(child.pid) if child.poll() is None else None
        found += [tree, *tree.children(recursive=True)] if tree else []
    for pid in _list_session(child.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    name, _, value = mark.partition("=")
    if name:
        found += [process for process in psutil.process_iter() if _read_environ(process).get(name) == value]
    return [process for process in found if process.pid != os.getpid()]


def _list_session(leader: int) -> Iterable[int]:
    """Processes of the session of `leader`."""
    for pid in _list_pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                yield pid


def _list_pids() -> Iterable[int]:
    if os.path.isdir("/proc/self"):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    import psutil

    return psutil.pids()


def _read_environ(process: psutil.Process) -> Mapping[str, str]:
    """The initial environment of a process; empty for a process of another user."""
    import psutil

    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _send_signal(process: psutil.Process, number: signal.Signals) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run_until_end(main: Callable[[], int]) -> NoReturn:
    """Exit with the exit code of `main`: runs the atexit handlers and skips Python's finalization.

    A library thread that takes the interpreter lock during finalization aborts the process (SIGABRT) after all its work
    is done; threads of Gloo sometimes do (github.com/pytorch/pytorch/pull/179291).
    """
    code = 1

    def leave() -> None:
        _kill_running()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader has exited, or the stream was closed
                stream.flush()
        # Skips the finalization of the interpreter; buffers were flushed above, and atexit handlers have run.
        os._exit(code)

    atexit.register(leave)  # registered before handlers of `main`, and therefore called after them
    try:
        sys.exit(main())
    except SystemExit as end:  # its own, or one of a library
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise

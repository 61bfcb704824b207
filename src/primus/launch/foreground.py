"""Run a program in this terminal, as if its user had started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from primus.errors import PrimusError

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are meant for the program; SIGINT of a terminal reaches it without us."""


def call(argv: Sequence[str], environ: Mapping[str, str], stdin: str | None = None, *, passes_on: bool = True) -> int:
    """Run `argv` until its end, passing signals on; gives its exit code, 128 + N where signal N ended it.

    Args:
        argv: Program and arguments.
        environ: Its variables.
        stdin: Text for its standard input; None for ours.
        passes_on: Whether signals are passed on; not where whoever sends them sends them to the program as well.

    Raises:
        PrimusError: It cannot be started.
    """
    sys.stdout.flush()
    try:
        child = subprocess.Popen(argv, env=dict(environ), stdin=None if stdin is None else subprocess.PIPE)
    except OSError as error:
        raise PrimusError(f"{argv[0]}: cannot be started: {error.strerror}") from None
    with child, _passing_on(child, passes_on):
        if child.stdin is not None and stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(stdin.encode())
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _passing_on(child: subprocess.Popen[bytes], passes_on: bool) -> Iterator[None]:
    """While open, signals to this process reach `child` instead; an interrupt does where no terminal sends it there."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not passes_on or (number == signal.SIGINT and _is_foreground()):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (*PASSED_ON, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_foreground() -> bool:
    """Whether this process is in the group to which a terminal sends its interrupts."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False

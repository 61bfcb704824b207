"""Run a program in this terminal, as if its user had started it.

The program gets a session of its own, so that the terminal's signals reach this process alone, and the program through
it: once, and in the form that it takes for what the user means. A program that reads the keyboard stays in ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TypeAlias

from primus.errors import PrimusError

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are meant for the program, besides the terminal's SIGINT."""
POLL_S = 0.1
"""Time that a signal may take until it is passed on; a second one counts as such after `signals.INSISTS_AFTER_S`."""

Child: TypeAlias = "subprocess.Popen[bytes]"


def send_signal(child: Child, number: int) -> None:
    """Send a signal to the program itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, number)


def run_in_foreground(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    has_terminal: bool = False,
    deliver: Callable[[Child, int], None] = send_signal,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Run `argv` until its end, passing signals on; gives its exit code, 128 + N where signal N ended it.

    Args:
        argv: Program and arguments.
        environ: Its variables.
        has_terminal: Whether it reads the keyboard, and hears the terminal's signals itself.
        deliver: Passes a signal on; called between the handlers, so that it may take its time.
        prepare: Called in the child before the program is.

    Raises:
        PrimusError: It cannot be started.
    """
    sys.stdout.flush()
    heard: list[int] = []
    with _note_signals(heard):
        try:
            child = subprocess.Popen(argv, env=dict(environ), start_new_session=not has_terminal, preexec_fn=prepare)
        except OSError as error:
            raise PrimusError(f"{argv[0]}: cannot be started: {error.strerror}") from None
        with child:
            while (code := _wait_for_child(child)) is None:
                while heard:
                    number = heard.pop(0)
                    if not (has_terminal and number == signal.SIGINT and _is_foreground()):
                        deliver(child, number)
    return code if code >= 0 else 128 - code


def _wait_for_child(child: Child) -> int | None:
    try:
        return child.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def _note_signals(heard: list[int]) -> Iterator[None]:
    """While open, signals to this process are noted; those that it was started to ignore, as nohup wants, stay so."""

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    numbers = [each for each in (*PASSED_ON, signal.SIGINT) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
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

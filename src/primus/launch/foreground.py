"""Run a program in the foreground and forward signals to it.

The program runs in its own session: the terminal then signals this process only, which forwards each signal once, in
the form that the program expects (docker stop, scancel). A program that reads the keyboard must stay in the session of
the terminal, and receives Ctrl-C from it directly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import BinaryIO, TypeAlias

from primus.errors import PrimusError
from primus.launch.terminal_relay import open_relay

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Forwarded signals, in addition to SIGINT."""
POLL_S = 0.1
"""Longest delay of a forwarded signal. It is below `signals.INSISTS_AFTER_S`, so that two signals stay two."""

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
    errors: BinaryIO | None = None,
) -> int:
    """Run `argv` to its end and forward signals; gives its exit code, or 128 + N if signal N ended it.

    Args:
        argv: Program and arguments.
        environ: Its variables.
        has_terminal: Whether it reads the keyboard, and receives the signals of the terminal itself.
        deliver: Forwards a signal; called outside of signal handlers, so that it may block.
        prepare: Called in the child before exec.
        errors: File that gets its standard error, which is shown from there, for whoever explains how it ended.

    Raises:
        PrimusError: It cannot be started.
    """
    # The child writes to the same file directly, so that buffered text would appear after its output.
    sys.stdout.flush()
    heard: list[int] = []
    # Handlers are installed before the child starts, so that no signal in between is lost.
    # A program that reads the keyboard draws on the terminal itself.
    with (
        _note_signals(heard),
        contextlib.nullcontext() if has_terminal else open_relay(environ) as output,
        _show_file(errors, sys.stderr.fileno() if output is None else output) if errors else contextlib.nullcontext(),
    ):
        try:
            child = subprocess.Popen(
                argv,
                env=dict(environ),
                stdout=output,
                stderr=errors or output,
                start_new_session=not has_terminal,
                preexec_fn=prepare,
            )
        except OSError as error:
            raise PrimusError(f"{argv[0]}: cannot be started: {error.strerror}") from None
        with child:
            while (code := _wait_for_child(child)) is None:
                while heard:
                    number = heard.pop(0)
                    # A terminal sends Ctrl-C to its whole foreground group, so the child has it already.
                    if not (has_terminal and number == signal.SIGINT and _is_foreground()):
                        deliver(child, number)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _show_file(file: BinaryIO, shown: int) -> Iterator[None]:
    """Copy what is appended to a file to the descriptor `shown` while open.

    The program writes to a file and not to a pipe, whose other side ends with this process: srun kills its tasks then.
    """
    over = threading.Event()

    def copy() -> None:
        position = 0
        while True:
            is_last = over.is_set()  # asked before the last look, which finds all that was written until then
            while data := os.pread(file.fileno(), 1 << 16, position):
                position += len(data)
                with contextlib.suppress(OSError):  # nobody listens any more
                    while data:
                        data = data[os.write(shown, data) :]
            if is_last:
                return
            over.wait(POLL_S)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wait_for_child(child: Child) -> int | None:
    try:
        # Returns early when the child ends. A handler only appends to a list, which the caller reads after this wait.
        return child.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def _note_signals(heard: list[int]) -> Iterator[None]:
    """Record signals to this process while open; signals that were ignored at its start (nohup) stay ignored."""

    def note(number: int, frame: FrameType | None) -> None:
        # Only appends: a handler may interrupt any code, including a lock that `deliver` would need.
        heard.append(number)

    numbers = [each for each in (*PASSED_ON, signal.SIGINT) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        # Restored also after an error, so that the caller's own handlers work again.
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_foreground() -> bool:
    """Whether this process is in the group to which a terminal sends its interrupts."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False

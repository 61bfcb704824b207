"""Show the output of a program that works elsewhere on this terminal: steps as short lines above a progress bar.

Workers in a container or on other hosts have no terminal. What they print reaches the launcher that the user has
started, through the client of the container engine, srun or ssh, and the launcher draws from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Mapping

from primus.launch.progress_bar import ProgressBar
from primus.runs.step_line import read_step_line, shorten_line
from primus.runtime import LOG_FORMAT_VARIABLE

LAST_OUTPUT_LIMIT_S = 5.0
"""Time for the rest of the output once the program has ended; a process that it leaves behind may hold the terminal."""


@contextlib.contextmanager
def open_relay(environ: Mapping[str, str]) -> Iterator[int | None]:
    """Gives the file descriptor for a program's output and errors; None where they are inherited: without a terminal,
    and where the user has chosen long lines.

    It is a terminal as well: the program shows its own progress, such as that of an image, as if it had the user's.

    Args:
        environ: Variables of the program.
    """
    if environ.get(LOG_FORMAT_VARIABLE) == "long" or not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield None
        return
    leader, follower = os.openpty()
    tty.setraw(follower)  # line breaks are the business of the user's terminal
    fcntl.ioctl(follower, termios.TIOCSWINSZ, fcntl.ioctl(sys.stderr, termios.TIOCGWINSZ, bytes(8)))
    # A thread, because the main thread waits for the program and passes signals on.
    screen = threading.Thread(target=_copy_output, args=(leader, os.ttyname(sys.stderr.fileno())), daemon=True)
    screen.start()
    try:
        yield follower
    finally:
        os.close(follower)  # the thread reads to the end once no process has the other side open
        screen.join(LAST_OUTPUT_LIMIT_S)


def _copy_output(leader: int, terminal: str) -> None:
    screen = TrainingScreen(terminal)
    # EIO: the program and its children have ended.
    with open(leader, "rb", buffering=0) as output, contextlib.closing(screen), contextlib.suppress(OSError):
        while data := output.read(65536):
            screen.write(data)


class TrainingScreen:
    """Writes output to a terminal: as it is until the first step, then line by line above the bar.

    Args:
        terminal: Its path.
    """

    def __init__(self, terminal: str) -> None:
        self._terminal = terminal
        self._bar: ProgressBar | None = None
        self._total = 0
        self._rest = b""
        """Begin of a line whose end has not arrived."""

    def write(self, data: bytes) -> None:
        """Show what the program has written."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show_line(line)
        # Only the line of a step is of interest as a whole; a progress display may never end its line.
        if self._bar is None and not self._rest.startswith(b" "):
            self._write_raw(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Show the rest, and remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._write_raw(self._rest)

    def _show_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        step = read_step_line(text)
        if step is not None and (self._bar is None or step.train_iters != self._total):
            self._open_bar(step.train_iters, step.step)
        if self._bar is None:
            self._write_raw(line + b"\n")
            return
        self._bar.print(shorten_line(text, self._bar.width))
        if step is not None:
            self._bar.update(step.step, "  ".join(step.values[:2]))

    def _open_bar(self, total: int, done: int) -> None:
        if self._bar is not None:  # of a training before this one
            self._bar.close()
            self._bar = None
        with contextlib.suppress(OSError):  # the terminal was closed in the meantime
            self._bar, self._total = ProgressBar(self._terminal, total, done, redirects_streams=True), total

    def _write_raw(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed: the run goes on
            sys.stderr.flush()
            os.write(sys.stderr.fileno(), data)

"""The progress bar on the terminal that launched the run, and the lines above it."""

from __future__ import annotations

import contextlib
import io
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


MIN_TEXT_WIDTH = 60
"""Columns of a terminal from which the bar has a text: loss and rate take about 30, steps and time left 20."""


class TerminalFile(io.FileIO):
    """A terminal that may be closed while the run goes on: what is written then goes nowhere."""

    def write(self, data: ReadableBuffer, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


class ProgressBar:
    """A bar at the bottom of a terminal.

    Args:
        terminal: Path of the terminal, for example /dev/pts/3.
        total: Steps of the run.
        done: Steps taken before.
        redirects_streams: Whether what this process prints appears above the bar; a rank prints to its log.

    Raises:
        OSError: The terminal cannot be opened.
    """

    def __init__(self, terminal: str, total: int, done: int, *, redirects_streams: bool = False) -> None:
        from rich.console import Console, ConsoleDimensions
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        class TerminalConsole(Console):
            """Has the size of its terminal at this moment: rich asks the standard streams, which are the rank's log."""

            @property  # type: ignore[misc]  # rich's can be set, this one is the terminal's
            def size(self) -> ConsoleDimensions:
                try:
                    columns, lines = os.get_terminal_size(self.file.fileno())
                except OSError:
                    columns, lines = 0, 0
                return ConsoleDimensions(columns or 80, lines or 25)

        terminal_file = io.BufferedWriter(TerminalFile(terminal, "w"))
        self._file = io.TextIOWrapper(terminal_file, encoding="utf-8", errors="backslashreplace")
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=TerminalConsole(file=self._file, force_terminal=True),
            # Steps may take minutes, with evaluations and saves between them: the last 1,000 steps give the time left.
            speed_estimate_period=math.inf,
            transient=True,
            redirect_stdout=redirects_streams,
            redirect_stderr=redirects_streams,
        )
        self._task: Any = self._progress.add_task("", total=total, completed=done)
        self._progress.start()

    @property
    def width(self) -> int:
        """Columns of the terminal at this moment."""
        return self._progress.console.width

    def update(self, step: int, text: str) -> None:
        """Draw the bar at `step`, followed by `text` if the terminal has room for it beside steps and time left."""
        shown = text if self.width >= MIN_TEXT_WIDTH else ""
        self._progress.update(self._task, completed=step, description=shown)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()
        self._file.close()

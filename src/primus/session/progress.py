"""The progress bar on the terminal that launched the run, and the lines above it."""

from __future__ import annotations

from typing import Any, TextIO


class ProgressBar:
    """A bar at the bottom of a terminal.

    Args:
        terminal: Path of the terminal, for example /dev/pts/3.
        total: Steps of the run.
        done: Steps taken before.

    Raises:
        OSError: The terminal cannot be opened.
    """

    def __init__(self, terminal: str, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._file: TextIO = open(terminal, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._progress = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(file=self._file, force_terminal=True),
            transient=True,
            redirect_stdout=False,  # they are the rank's log
            redirect_stderr=False,
        )
        self._task: Any = self._progress.add_task("", total=total, completed=done)
        self._progress.start()

    def update(self, step: int, text: str) -> None:
        """Draw the bar at `step`, followed by `text`."""
        self._progress.update(self._task, completed=step, description=text)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()
        self._file.close()

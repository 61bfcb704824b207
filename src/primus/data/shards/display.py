"""Lines of a data task for people, and below them on a terminal how far it is."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primus.data.shards.workers import ShardProgress

SHOW_EVERY_S = 0.2


class ProgressDisplay:
    """Writes to standard error. It starts no thread, so that processes can be forked while it is in use."""

    def __init__(self) -> None:
        self._live: Any = None
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def print_line(self, text: str) -> None:
        """Print a line."""
        if self._live:
            self._live.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def show_progress(self, progress: ShardProgress) -> None:
        """Show the progress on a terminal, a few times a second at most."""
        now = time.monotonic()
        if self._live and now - self._shown >= SHOW_EVERY_S:
            self._shown = now
            self._live.update(format_progress(progress, now - self._start), refresh=True)


def format_progress(progress: ShardProgress, seconds: float) -> str:
    """How far a stage is: ``encoding text: 42 %  12,345 documents  34,567,890 tokens  8 s``."""
    share = f"{100 * progress.done_bytes / progress.total_bytes:.0f} %" if progress.total_bytes else ""
    counts = (f"{amount:,} {name.replace('_', ' ')}" for name, amount in progress.counts.items() if amount)
    return "  ".join([f"{progress.stage}: {share}".rstrip(), *counts, f"{seconds:.0f} s"])

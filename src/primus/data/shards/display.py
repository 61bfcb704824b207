"""Human-readable output of a data command: lines, and a progress display on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from primus.data.shards.workers import ShardProgress

SHOW_EVERY_S = 0.2
"""Shortest interval between updates: faster updates cost time and are not visible."""


class ProgressDisplay:
    """Writes lines and progress to standard error. It starts no thread, so forking is safe while it is in use."""

    def __init__(self) -> None:
        self._live: Any = None
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
            # A refresh thread could hold a lock at the time of a fork, and the child would wait for that lock forever.
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
        """Update the progress display on a terminal, at most every `SHOW_EVERY_S`."""
        now = time.monotonic()
        if self._live and now - self._shown >= SHOW_EVERY_S:
            self._shown = now
            self._live.update(format_progress(progress, now - self._start), refresh=True)


def format_progress(progress: ShardProgress, seconds: float) -> str:
    """Format the progress of a stage: ``encoding text: 42 %  12,345 documents  34,567,890 tokens  8 s``."""
    share = f"{100 * progress.done_bytes / progress.total_bytes:.0f} %" if progress.total_bytes else ""
    counts = (f"{amount:,} {name.replace('_', ' ')}" for name, amount in progress.counts.items() if amount)
    return "  ".join([f"{progress.stage}: {share}".rstrip(), *counts, f"{seconds:.0f} s"])

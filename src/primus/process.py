"""Run a read-only command with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def output(argv: Sequence[str], timeout_s: float = 5.0, cwd: Path | None = None) -> str | None:
    """Standard output of a command without its last newline; None where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, cwd=cwd, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None

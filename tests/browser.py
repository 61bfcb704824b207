"""A real headless Chromium that opens a file or an address; tests that need one are skipped where none is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
TIMEOUT_S = 60


def dom(path: Path | str) -> str:
    """The document that the browser makes of a file, or of what is at an address."""
    return _run(path, "--dump-dom")


def screenshot(path: Path, png: Path, size: tuple[int, int] = (1280, 900), *, is_dark: bool = False) -> Path:
    """A picture of the file as the browser shows it, for a reader who prefers light or dark."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    _run(path, f"--window-size={size[0]},{size[1]}", f"--screenshot={png}", *scheme)
    return png


def _run(path: Path | str, *words: str) -> str:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no chromium is installed")
    with tempfile.TemporaryDirectory() as profile:
        argv = [
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            *words,
            path if isinstance(path, str) else path.resolve().as_uri(),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

"""A disk that is full: a file system in memory, of a size that a test chooses."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"


@contextmanager
def mount_small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of `megabytes` at `folder`; skips the test where it cannot be mounted."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        # Lazily: a process that a failed test has left may still hold a file of it.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_disk(folder: Path) -> Path:
    """Write a file that takes all space of the file system of `folder`; deleting it frees the disk."""
    path = folder / BALLAST
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return path

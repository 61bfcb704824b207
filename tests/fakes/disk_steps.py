"""The order of the calls that a power failure can undo: syncs, renames and deletions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Steps = list[tuple[str, str]]
"""What happened, and to which name: the new one of a rename, "." for the folder."""

EVENTS = {"os.rename": ("rename", 1), "os.remove": ("delete", 0)}
"""What Python audits, and which argument has the path."""
_recorders: list[Callable[[str, Any], None]] = []


@contextmanager
def record_disk_steps(folder: Path) -> Iterator[Steps]:
    """Record the calls on the files of `folder`, and on itself, within the block."""
    steps: Steps = []
    sync = os.fsync

    def record(kind: str, path: Any) -> None:
        found = Path(path)
        is_absent = kind == "delete" and not found.exists()
        if (found == folder or found.parent == folder) and not is_absent:
            steps.append((kind, str(found.relative_to(folder))))

    def record_sync(descriptor: int) -> None:
        record("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    if not _recorders:
        _recorders.append(record)
        sys.addaudithook(_pass_on)  # there is no way to remove one
    _recorders[0] = record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", record_sync)
        yield steps
    _recorders[0] = _ignore


def _pass_on(event: str, args: tuple[Any, ...]) -> None:
    if event in EVENTS:
        kind, place = EVENTS[event]
        _recorders[0](kind, args[place])


def _ignore(kind: str, path: Any) -> None:
    pass

"""A folder of files that the shards of a board gave: made beside the board, then given its name as a whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from primus.data import atomic
from primus.data.manifest import FileFacts
from primus.data.work import Board, Row


def new_folder(work: Path, name: str) -> Path:
    """An empty folder in the work folder, for this process alone."""
    folder = work / f"{name}.{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def collect(board: Board, rows: Sequence[Row], suffix: str, folder: Path, ending: str) -> dict[str, FileFacts]:
    """Names in a folder for the files of a board, which keep the old ones so that nobody does them again.

    Args:
        board: The board.
        rows: Its rows.
        suffix: Which file of each row.
        folder: Where the names are made.
        ending: What they end in, after the number of the shard.
    """
    files = {}
    for row in rows:
        name = f"{row.shard:06d}.{ending}"
        files[name] = row.files[suffix]
        try:
            os.link(board.file(row, suffix), folder / name)
        except OSError:  # a file system without hard links
            shutil.copyfile(board.file(row, suffix), folder / name)
            atomic.sync(folder / name)
    return files


def move(folder: Path, place: Path, work: Path) -> None:
    """Give a folder its name; what is there, and is to be replaced, goes into the work folder."""
    if place.exists():
        with suppress(OSError):
            place.rmdir()
    if place.exists():
        place.rename(work / f"replaced.{place.name}.{os.getpid()}")
    folder.rename(place)
    atomic.sync(place.parent)

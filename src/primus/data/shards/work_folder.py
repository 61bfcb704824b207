"""The hidden folder ``.NAME.work`` beside an output, in which processes share the work; deleted at the end.

It has a folder for each shard queue, ``QUEUE.used`` with a shared lock of every process that works on the queue, and
``KEY.publishing`` while the files of a key are renamed. A queue is deleted only while nobody holds its lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from primus.data import atomic
from primus.data.shards.shard_queue import ShardQueue


@dataclass(frozen=True)
class WorkFolder:
    """Boards of shards, what they need in common, and what tells how far an output is."""

    path: Path
    lock: Path
    """Held by whoever does what only one process may do; beside the folder, which may go while others wait."""

    @classmethod
    def for_output(cls, output: Path) -> WorkFolder:
        """The folder for an output."""
        return cls(output.with_name(f".{output.name}.work"), output.with_name(f".{output.name}.lock"))

    @contextmanager
    def mark_in_use(self, board: ShardQueue) -> Iterator[None]:
        """Keep a board that is being worked on from being swept."""
        with atomic.hold_in_use(self._lease_path(board.folder)):
            yield

    def mark_publishing(self, name: str) -> None:
        """Remember that from now on files of this name may be half of one work and half of another."""
        self._mark_path(name).touch()
        atomic.sync_to_disk(self.path)

    def was_publishing(self, name: str) -> bool:
        """Whether somebody who began to publish files of this name may not have come to the end."""
        return self._mark_path(name).exists()

    def finish_publishing(self, name: str, board: ShardQueue) -> None:
        """Forget a board of which all use has been made: for others who look into it the work is over."""
        self._mark_path(name).unlink(missing_ok=True)
        atomic.remove_folder(board.folder)

    def delete_unused(self, complete: bool) -> None:
        """Delete boards that nobody uses and that hold nothing to go on from, then what nobody needs any more.

        Args:
            complete: The output is there, so nobody goes on from any of them.
        """
        with suppress(OSError):  # what cannot be deleted now is found by the next sweep
            if complete:
                atomic.remove_lock(self.lock)
            for gone in self.path.glob("*.tmp.*"):
                shutil.rmtree(gone, ignore_errors=True)
            for lease in self.path.glob("*.used"):
                board = lease.with_suffix("")
                if not atomic.is_in_use(lease) and (complete or not any(board.glob("*.json"))):
                    atomic.remove_folder(board)
                    lease.unlink(missing_ok=True)
            if not any(entry.is_dir() for entry in self.path.iterdir()):
                for file in self.path.glob("tokenizer-*.json"):
                    file.unlink(missing_ok=True)
            self.path.rmdir()

    def _lease_path(self, board: Path) -> Path:
        return board.with_name(f"{board.name}.used")

    def _mark_path(self, name: str) -> Path:
        return self.path / f"{name}.publishing"

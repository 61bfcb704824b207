"""The hidden folder ``.NAME.work`` next to an output, in which processes share the work; deleted at the end.

Content:
    QUEUE/            the folder of a shard queue
    QUEUE.used        locked in shared mode by every process that works on the queue
    KEY.publishing    exists from before the first rename of the key's output files until after the last
    tokenizer-*.json  a tokenizer trained for the job

A queue is deleted only while no process holds ``QUEUE.used``. If ``KEY.publishing`` exists while the lock is free, the
publisher was killed: the output files of the key may belong to different runs and are published again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from primus.data import atomic
from primus.data.shards.shard_queue import ShardQueue
from primus.runs.files import sync_to_disk


@dataclass(frozen=True)
class WorkFolder:
    """Work folder of one output, and its lock."""

    path: Path
    lock: Path
    """Exclusive lock for steps that one process performs, such as publishing. It is next to the folder, not inside it,
    because the folder may be deleted while other processes wait for the lock."""

    @classmethod
    def for_output(cls, output: Path) -> WorkFolder:
        """Work folder of an output."""
        return cls(output.with_name(f".{output.name}.work"), output.with_name(f".{output.name}.lock"))

    @contextmanager
    def mark_in_use(self, queue: ShardQueue) -> Iterator[None]:
        """Protect a shard queue from `delete_unused` within the block. The lock ends with the process."""
        with atomic.hold_in_use(self._build_lease_path(queue.folder)):
            yield

    def mark_publishing(self, name: str) -> None:
        """Record on disk that the files of this key are being replaced; call it with the lock held, before renaming."""
        self._mark_path(name).touch()
        sync_to_disk(self.path)

    def was_publishing(self, name: str) -> bool:
        """Whether a process started to publish files of this key and has not finished."""
        return self._mark_path(name).exists()

    def finish_publishing(self, name: str, queue: ShardQueue) -> None:
        """Delete the queue and the mark after the last rename; processes that wait for its shards stop then."""
        # The mark first: a kill in between leaves a complete output and a queue that `delete_unused` removes later. In
        # the other order it leaves a mark without shards, and the complete output is encoded again.
        self._mark_path(name).unlink(missing_ok=True)
        atomic.remove_folder(queue.folder)

    def delete_unused(self, complete: bool) -> None:
        """Delete unused queues without finished shards, then files that no queue needs. Any process may call it.

        Args:
            complete: Whether the output exists, so that finished shards are not needed to resume.
        """
        with suppress(OSError):  # what cannot be deleted now is deleted by the next call
            if complete:
                atomic.remove_lock(self.lock)
            for gone in self.path.glob("*.tmp.*"):
                shutil.rmtree(gone, ignore_errors=True)
            for lease in self.path.glob("*.used"):
                queue = lease.with_suffix("")
                # An incomplete run keeps queues with finished shards: repeating the command resumes from them.
                if not atomic.is_in_use(lease) and (complete or not any(queue.glob("*.json"))):
                    atomic.remove_folder(queue)
                    lease.unlink(missing_ok=True)
            # A trained tokenizer determines the identity of the queues, so it stays as long as any queue does.
            if not any(entry.is_dir() for entry in self.path.iterdir()):
                for file in self.path.glob("tokenizer-*.json"):
                    file.unlink(missing_ok=True)
            self.path.rmdir()  # fails unless the folder is empty, which keeps the files of other processes

    def _build_lease_path(self, queue: Path) -> Path:
        return queue.with_name(f"{queue.name}.used")

    def _mark_path(self, name: str) -> Path:
        return self.path / f"{name}.publishing"

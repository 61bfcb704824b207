"""Processes of a run on several hosts that exchange values through the run folder, without a tensor library."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primus.runs.attempt import Attempt

LIMIT_S = 60.0


@dataclass
class FolderProcesses:
    """A `primus.session.ranks.processes.Processes`: each value is a file, NUMBER.RANK, which all processes read."""

    folder: Path
    rank: int
    world: int
    name: str = "main"
    """Threads that exchange at the same time have different names."""
    number: int = 0
    writers: Any = field(default=None, repr=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def writer_group(self) -> Any:
        if self.writers is None:
            self.writers = FolderProcesses(self.folder, self.rank, self.world, "writers")
        return self.writers

    def all_reduce_max(self, value: int) -> int:
        return max(self.all_gather_values(value))

    def broadcast_from_first(self, value: Any) -> Any:
        return self.all_gather_values(value if self.is_first else None)[0]

    def all_gather_values(self, value: Any, group: Any = None) -> list[Any]:
        if group is not None and group is not self:
            return list(group.all_gather_values(value))
        self.number += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [self.folder / f"{self.name}.{self.number}.{rank}" for rank in range(self.world)]
        partial = self.folder / f".{files[self.rank].name}"
        partial.write_bytes(pickle.dumps(value))
        os.replace(partial, files[self.rank])
        # All processes have read what is two exchanges old, since they have written the one before this.
        (self.folder / f"{self.name}.{self.number - 2}.{self.rank}").unlink(missing_ok=True)
        return [self._read(file) for file in files]

    def _read(self, file: Path) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not file.exists():
            assert time.monotonic() < deadline, f"{file}: not within {LIMIT_S} s"
            time.sleep(0.001)
        return pickle.loads(file.read_bytes())


def join_processes(attempt: Attempt) -> FolderProcesses:
    """The processes of an attempt; its folder is on a disk that all hosts share."""
    return FolderProcesses(attempt.folder / "exchange", attempt.rank, attempt.world_size)

"""A stage that is quick and can be made to fail: it turns letters of files into capitals."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primus.data.readers.shard import FilePart, Shard, group_parts
from primus.data.shards.shard_queue import ShardOutput
from primus.errors import UsageError


@dataclass
class Capitals:
    """Writes each shard's text in capitals to ``bin``, and notes beside the text who has done it."""

    notes: Path
    """Folder of one file for each shard that was begun, with a line for each process that began it."""
    fails_at: int = -1
    """Shard that is bad."""
    dies_at: int = -1
    """Shard whose first worker is killed in the middle of it."""
    leaves_out: int = 0
    """Items that each shard leaves out."""
    pause_s: float = 0.0
    """Time that each shard takes."""
    identity: Any = field(default="capitals", init=False)
    _is_ready: bool = field(default=False, init=False)

    def start(self) -> None:
        self._is_ready = True

    def run(self, shard: Shard, output: ShardOutput) -> None:
        assert self._is_ready
        with (self.notes / str(shard.index)).open("a") as note:
            note.write(f"{os.getpid()}\n")
        if shard.index == self.fails_at:
            raise UsageError(f"shard {shard.index} is bad", "mend it")
        with output.path("bin").open("wb") as file:
            for part in shard.parts:
                text = Path(part.file).read_bytes()[part.first : part.last]
                file.write(text[: len(text) // 2].upper())
                file.flush()
                if shard.index == self.dies_at and len((self.notes / str(shard.index)).read_text().split()) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(self.pause_s)
                file.write(text[len(text) // 2 :].upper())
        for number in range(self.leaves_out):
            output.record_bad(f"shard {shard.index}:{number}", "not text")
        output.add_counts(documents=1)

    def begun(self) -> dict[int, int]:
        """How often each shard was begun."""
        return {int(note.name): len(note.read_text().split()) for note in self.notes.iterdir()}


def shards_of(file: Path, size: int) -> list[Shard]:
    """Shards of `size` bytes of a file."""
    parts = [FilePart(str(file), first, first + size) for first in range(0, file.stat().st_size, size)]
    return group_parts(((part, size) for part in parts), size)

"""What the processes of a run were given at each step, as `primus.session.batches.batch_record` wrote it."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from primus.runs.store import Run

RECORD_VARIABLE = "PRIMUS_RECORD_BATCHES"
"""The value in primus.session.batches.batch_record, which imports numpy."""


class TakenBatch(Struct, kw_only=True):
    """The batch of a step; in a file, the part of it that one process was given."""

    consumed_samples: int
    """Samples that the run has consumed after the step."""
    samples: dict[str, int]
    """Checksum of each sample by its place in the global batch."""
    shape: tuple[int, ...] | None = None
    """Micro batches, rows and columns that a process was given."""


def read_batch_records(run: Run) -> dict[int, TakenBatch]:
    """The batches by the samples consumed after them."""
    found: dict[int, TakenBatch] = {}
    for path in sorted(run.directory.glob("logs/attempt_*/batches_rank_*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                taken = msgspec.json.decode(line, type=TakenBatch)
            except msgspec.MsgspecError:  # the last line of a killed process
                continue
            found.setdefault(taken.consumed_samples, taken).samples.update(taken.samples)
    return found

"""A record of what each process was given: comparisons of engines check that all had the same.

A line for each step of a process: {"consumed_samples": 8, "shape": [2, 4, 257], "samples": {"0": 3232385830, ...}} with
the number of micro batches and the size of each, targets included, and the CRC-32 of the tokens of each sample.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import TextIO

import numpy as np

from primus.data.training.loader import Batches, MicroBatches
from primus.runs.attempt import Attempt
from primus.session.profile.spans import DATA_SPAN, open_span

RECORD_VARIABLE = "PRIMUS_RECORD_BATCHES"
"""Variable that makes the processes of a run write the record, and the fingerprint of the initial weights, if it is
1."""


class RecordedBatches(Batches):
    """Batches that write the record of each step that is taken."""

    record: TextIO | None = None

    def __next__(self) -> MicroBatches:
        first = self.consumed_samples
        with open_span(DATA_SPAN):
            batches = super().__next__()
        if self.record is not None:
            line = format_record(batches, first, self.consumed_samples, (self.rank, self.world_size))
            self.record.write(line)
            self.record.flush()
        return batches

    def close(self) -> None:
        super().close()
        if self.record is not None:
            self.record.close()


def format_record(batches: MicroBatches, first: int, consumed_samples: int, place: tuple[int, int]) -> str:
    """The line of a step whose first sample is `first`, of the process with this rank of so many."""
    rank, world_size = place
    samples = {
        first + (index * world_size + rank) * len(batch) + row: zlib.crc32(
            np.ascontiguousarray(tokens, dtype="<i8").data
        )
        for index, batch in enumerate(batches)
        for row, tokens in enumerate(batch)
    }
    shape = [len(batches), *batches[0].shape]
    return json.dumps({"consumed_samples": consumed_samples, "shape": shape, "samples": samples}) + "\n"


def open_record(attempt: Attempt, environ: Mapping[str, str]) -> TextIO | None:
    """The record of this process; None unless the variable asks for it."""
    if environ.get(RECORD_VARIABLE) != "1":
        return None
    return (attempt.folder / f"batches_rank_{attempt.rank}.jsonl").open("a", encoding="utf-8")

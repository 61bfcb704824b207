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
from primus.session.spans import DATA_SPAN, open_span

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
            samples = {
                first + (index * self.world_size + self.rank) * self.micro_batch_size + row: zlib.crc32(
                    np.ascontiguousarray(tokens, dtype="<i8").data
                )
                for index, batch in enumerate(batches)
                for row, tokens in enumerate(batch)
            }
            shape = [len(batches), *batches[0].shape]
            line = {"consumed_samples": self.consumed_samples, "shape": shape, "samples": samples}
            self.record.write(json.dumps(line) + "\n")
            self.record.flush()
        return batches

    def close(self) -> None:
        super().close()
        if self.record is not None:
            self.record.close()


def open_record(attempt: Attempt, environ: Mapping[str, str]) -> TextIO | None:
    """The record of this process; None unless the variable asks for it."""
    if environ.get(RECORD_VARIABLE) != "1":
        return None
    return (attempt.folder / f"batches_rank_{attempt.rank}.jsonl").open("a", encoding="utf-8")

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

from primus.data.training.loader import Batches, BatchShape, MicroBatches
from primus.session.training_run import TrainingRun

RECORD_VARIABLE = "PRIMUS_RECORD_BATCHES"
"""Variable that makes the processes of a run write the record, and the fingerprint of the initial weights, if it is
1."""


class RecordedBatches(Batches):
    """Batches that write the record of each step that is taken, into a file that they close."""

    record: TextIO

    def __next__(self) -> MicroBatches:
        first = self.consumed_samples
        batches = super().__next__()
        self.record.write(format_record(batches, first, self.consumed_samples, self.shape))
        self.record.flush()
        return batches

    def close(self) -> None:
        super().close()
        self.record.close()


def is_recorded(environ: Mapping[str, str]) -> bool:
    """Whether the variable asks for a record of the inputs of a run."""
    return environ.get(RECORD_VARIABLE) == "1"


def open_batches(run: TrainingRun) -> Batches:
    """The micro batches of the steps from the next one on, of this process."""
    given = (run.session.data.train, run.batch_shape, run.consumed_samples, run.trainer.data.num_workers)
    if not is_recorded(run.session.environ):
        return Batches(*given)
    batches = RecordedBatches(*given)
    batches.record = (run.attempt.folder / f"batches_rank_{run.attempt.rank}.jsonl").open("a", encoding="utf-8")
    return batches


def format_record(batches: MicroBatches, first: int, consumed_samples: int, shape: BatchShape) -> str:
    """The line of a step whose first sample is `first`."""
    samples = {
        start + row: zlib.crc32(np.ascontiguousarray(tokens, dtype="<i8").data)
        for start, batch in zip(shape.list_starts(first), batches, strict=True)
        for row, tokens in enumerate(batch)
    }
    line = {"consumed_samples": consumed_samples, "shape": [len(batches), *batches[0].shape], "samples": samples}
    return json.dumps(line) + "\n"

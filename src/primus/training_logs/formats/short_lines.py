"""The short lines of primus (`log_format: short`): `step  7/300  loss 8.2500  12,346 tokens/s/device  0.86 GiB`.

Source: `primus.runs.step_line`. How many values a line has depends on the terminal that it was made for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import parse_number
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

STEP = re.compile(rb"\bstep +(\d+)/\d+  (loss \S+(?:  .*)?)")
EVALUATION = re.compile(rb"\bvalidation loss at step (\d+): (\S+),")
FIELDS = {
    b"loss": ("loss", 1.0),
    b"skipped": ("num_skipped", 1.0),
    b"tokens/s/device": ("tokens_per_s_per_device", 1.0),
    b"GiB": ("memory_gib", 1.0),
    b"s/step": ("step_time_s", 1.0),
    b"grad norm": ("grad_norm", 1.0),
    b"lr": ("learning_rate", 1.0),
    b"MFU": ("mfu", 0.01),
    b"TFLOP/s/device": ("tflops_per_device", 1.0),
}
"""Field and factor by the name or unit of a value."""
NAME_OF_VALUE = re.compile(rb"[a-zA-Z][a-zA-Z/ ]*[a-zA-Z](?= |$)")


class ShortLineReader(StepReader):
    """The short lines of primus."""

    NAME = "short"
    TITLE = "primus, short lines"
    ANCHORS = (b"step ",)
    MEMORY = "peak of the first process"

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        return STEP.search(line) is not None

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        if evaluation := EVALUATION.search(line):
            yield LogEvaluation({"step": float(evaluation[1]), "loss": parse_number(evaluation[2])})
        elif found := STEP.search(line):
            values = {"step": float(found[1])}
            for part in re.split(rb" {2,}", found[2].strip()):
                name = NAME_OF_VALUE.search(part)
                if name and name[0] in FIELDS:
                    field, factor = FIELDS[name[0]]
                    values[field] = parse_number(part.replace(name[0], b"")) * factor
            yield LogStep(values)

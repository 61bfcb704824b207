"""Lines of torchtitan: `step: N  loss: ...  tps: ...`, one of each rank.

Source: torchtitan/components/metrics.py. `tps` is of one device, `memory` the most that was reserved since the last
line, `mfu` N/A with quantization. Ranks of other pipeline stages than the last print the loss -1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import LogLineError, parse_optional, parse_rank, parse_time_stamp, split_steps
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

START = re.compile(rb"(validate )?\bstep: *(\d+) +(?=loss:)")
VALUE = re.compile(rb"\b(\w+): *([^\s:]+)")
FIELDS = {
    b"loss": ("loss", 1.0),
    b"grad_norm": ("grad_norm", 1.0),
    b"lr": ("learning_rate", 1.0),
    b"memory": ("memory_gib", 1.0),
    b"tps": ("tokens_per_s_per_device", 1.0),
    b"tflops": ("tflops_per_device", 1.0),
    b"mfu": ("mfu", 0.01),
}


class TorchtitanReader(StepReader):
    """torchtitan."""

    NAME = "torchtitan"
    TITLE = "torchtitan"
    ANCHORS = (b"step: ",)
    END = re.compile(rb"(?:%|N/A|tps: *[\d,]+)\s*$")
    MEMORY = "most that PyTorch had reserved"

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        for found, prefix, text in split_steps(START, line):
            values = {"step": float(found[2])}
            for name, number in VALUE.findall(text):
                field = FIELDS.get(name)
                value = parse_optional(number) if field else None
                if field and value is not None:
                    values[field[0]] = value * field[1]
            if "loss" not in values:
                raise LogLineError("no loss")
            if found[1]:
                yield LogEvaluation({"step": values["step"], "loss": values["loss"]})
                continue
            if len(values) < 3:
                raise LogLineError("a step without other values than the loss")
            if values["loss"] == -1.0:
                del values["loss"]
            yield LogStep(values, parse_rank(prefix), parse_time_stamp(prefix))


READER = TorchtitanReader

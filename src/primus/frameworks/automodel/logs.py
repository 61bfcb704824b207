"""Lines of NeMo AutoModel: `step 9 | epoch 0 | loss 0.6974 | ...`; its steps count from 0.

Source: `log_train_metrics` of the recipes in NVIDIA-NeMo/Automodel, and its StepScheduler, which counts a step after
its line. Memory is the most that PyTorch had allocated. The rate for each device stands in parentheses; lines of 2025
have only that of all devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import LogLineError, parse_number, parse_time_stamp, split_steps
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

START = re.compile(rb"(\[val\] (?:[^|]*\| )?)?\bstep (\d+) \| epoch \d+ \| ")
SEGMENT = re.compile(rb"([a-z_]+):? +([^|]+)")
DEVICE_RATE = re.compile(rb"\(([\d.,]+)/gpu\)")
FIELDS = {
    b"loss": "loss",
    b"grad_norm": "grad_norm",
    b"lr": "learning_rate",
    b"mem": "memory_gib",
}


class AutomodelReader(StepReader):
    """NeMo AutoModel."""

    NAME = "automodel"
    TITLE = "NeMo AutoModel"
    ANCHORS = (b"| epoch ",)
    MEMORY = "most that PyTorch had allocated"

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        for found, prefix, text in split_steps(START, line):
            texts: dict[bytes, bytes] = dict(SEGMENT.findall(text))
            values = {field: parse_number(texts[name]) for name, field in FIELDS.items() if name in texts}
            if "loss" not in values:
                raise LogLineError("no loss")
            step = float(found[2]) + 1
            if found[1]:
                yield LogEvaluation({"step": step, "loss": values["loss"]})
                continue
            rate = DEVICE_RATE.search(texts.get(b"tps", b""))
            if rate:
                values["tokens_per_s_per_device"] = parse_number(rate[1])
            yield LogStep({"step": step, **values}, time_s=parse_time_stamp(prefix))


READER = AutomodelReader

"""Lines of nanotron: `iteration: N / M | consumed_tokens: 85.8G | ...`, rounded to three digits.

Source: the log items of `train_step_logs` in src/nanotron/trainer.py of huggingface/nanotron. Suffixes are powers of
1000, of bytes too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import GIB, LogLineError, parse_number, parse_time_stamp, split_steps
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import StepReader

START = re.compile(rb"\biteration: *(\d+) */ *\d+ *\|")
AMERICAN_DATE = re.compile(rb"(\d\d)/(\d\d)/(\d{4}) (\d\d:\d\d:\d\d)")
SUFFIXES = {b"K": 1e3, b"M": 1e6, b"G": 1e9, b"T": 1e12, b"B": 1e9}
FIELDS = {
    b"consumed_tokens": ("consumed_tokens", 1.0),
    b"elapsed_time_per_iteration_ms": ("step_time_s", 1e-3),
    b"time_per_iteration_ms": ("step_time_s", 1e-3),
    b"tokens_per_sec_per_gpu": ("tokens_per_s_per_device", 1.0),
    b"global_batch_size": ("global_batch_size", 1.0),
    b"lm_loss": ("loss", 1.0),
    b"lr": ("learning_rate", 1.0),
    b"model_tflops_per_gpu": ("tflops_per_device", 1.0),
    b"grad_norm": ("grad_norm", 1.0),
    b"cuda_max_memory_reserved": ("memory_gib", 1 / GIB),
}


class NanotronReader(StepReader):
    """nanotron."""

    NAME = "nanotron"
    TITLE = "nanotron"
    ANCHORS = (b"iteration: ",)
    MEMORY = "most that PyTorch had reserved"

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        for found, prefix, text in split_steps(START, line):
            values = {"step": float(found[1])}
            for part in text.split(b"|"):
                name, _, value = part.partition(b": ")
                field = FIELDS.get(name.strip())
                if field:
                    values[field[0]] = parse_number(value) * SUFFIXES.get(value.strip()[-1:], 1.0) * field[1]
            if "step_time_s" not in values or "loss" not in values:
                raise LogLineError("no time or no loss")
            yield LogStep(values, time_s=_parse_time(prefix))


def _parse_time(prefix: bytes) -> float | None:
    return parse_time_stamp(AMERICAN_DATE.sub(rb"\3-\1-\2 \4", prefix))


READER = NanotronReader

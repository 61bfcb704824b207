"""Blocks of llm-foundry and Composer: `[batch=366/48000]:` and a line `Train name: value` for each value.

Source: composer/loggers/console_logger.py of mosaicml/composer, and its callbacks for speed and memory. Memory is in
10^9 bytes. The rate is a mean over the last batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import NUMBER, parse_number
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

HEADER = re.compile(rb"\[(Eval )?(batch|token|sample|epoch|iteration|second)=(\d+)(?:/\d+)?\]")
VALUE = re.compile(rb"\b(Train|Eval) ([\w/.-]+): *(\S+)")
GB_IN_GIB = 1e9 / (1 << 30)
FIELDS = {
    b"loss/train/total": ("loss", 1.0),
    b"time/token": ("consumed_tokens", 1.0),
    b"time/sample": ("consumed_samples", 1.0),
    b"memory/peak_reserved_mem": ("memory_gib", GB_IN_GIB),
    b"memory/reserved_mem": ("memory_gib", GB_IN_GIB),
    b"throughput/device/tokens_per_sec": ("tokens_per_s_per_device", 1.0),
    b"throughput/device/flops_per_sec": ("tflops_per_device", 1e-12),
    b"throughput/device/mfu": ("mfu", 1.0),
    b"throughput/samples_per_sec": ("samples_per_s", 1.0),
    b"l2_norm/grad/global": ("grad_norm", 1.0),
}
CROSS_ENTROPY = b"metrics/train/LanguageCrossEntropy"
"""The loss, where the total loss is not logged."""
LEARNING_RATE = re.compile(rb"lr-\w+/group0")
EVALUATION = re.compile(rb"(?:metrics|loss)/.*(?:CrossEntropy|/total)$")


class LlmFoundryReader(StepReader):
    """llm-foundry, and other trainers on Composer."""

    NAME = "llm-foundry"
    TITLE = "llm-foundry (Composer)"
    ANCHORS = (b"batch=", b"token=", b"sample=", b"epoch=", b"Train ", b"Eval ")
    MEMORY = "most that PyTorch had reserved"

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, float] | None = None
        self._last_step = 0.0

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        found = VALUE.search(line)
        return found is not None and found[2] in FIELDS

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        headers = HEADER.findall(line)
        if headers:
            yield from self.finish()
            is_evaluation, unit, count = headers[-1]
            if not is_evaluation:
                self._waiting = {"step": float(count)} if unit == b"batch" else {}
        for kind, name, text in VALUE.findall(line):
            if kind == b"Eval":
                if EVALUATION.search(name) and NUMBER.search(text):
                    yield LogEvaluation({"step": self._last_step, "loss": parse_number(text)})
            elif self._waiting is not None:
                self._set_value(self._waiting, name, text)

    def finish(self) -> Iterable[LogStep]:
        values, self._waiting = self._waiting, None
        if values and "step" in values and len(values) > 1:
            self._last_step = values["step"]
            yield LogStep(values)

    def _set_value(self, values: dict[str, float], name: bytes, text: bytes) -> None:
        if not NUMBER.search(text):
            return
        if name == b"time/batch":
            # The number of batches before this one; the header counts epochs, tokens or samples instead of batches.
            values.setdefault("step", parse_number(text) + 1)
        elif name == b"throughput/batches_per_sec":
            values["step_time_s"] = 1 / parse_number(text) if parse_number(text) else 0.0
        elif name == CROSS_ENTROPY:
            values.setdefault("loss", parse_number(text))
        elif LEARNING_RATE.fullmatch(name):
            values["learning_rate"] = parse_number(text)
        elif name in FIELDS:
            field, factor = FIELDS[name]
            values[field] = parse_number(text) * factor


READER = LlmFoundryReader

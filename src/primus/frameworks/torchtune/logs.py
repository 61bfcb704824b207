"""Lines of torchtune: `Step 4 | loss:1.15 lr:2e-05 tokens_per_second_per_gpu:40.1 ...`, and its progress bar.

Source: DiskLogger and StdoutLogger in torchtune/training/metric_logging.py of meta-pytorch/torchtune, and its recipes.
Memory is in GiB. The bar `1|4|Loss: 1.15:` counts steps of all epochs, and is drawn before the line of its step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import LogLineError, find_bar, parse_number, split_steps
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import StepReader

START = re.compile(rb"\bStep (\d+) \| (?=\w+:)")
VALUE = re.compile(rb"(\w+):(\S+)")
BAR = re.compile(rb"\b\d+\|(\d+)\|Loss: ([-+.\deEnaif]+):")
FIELDS = {
    b"loss": "loss",
    b"lr": "learning_rate",
    b"grad_norm": "grad_norm",
    b"tokens_per_second_per_gpu": "tokens_per_s_per_device",
    b"peak_memory_reserved": "memory_gib",
}


class TorchtuneReader(StepReader):
    """torchtune."""

    NAME = "torchtune"
    TITLE = "torchtune"
    ANCHORS = (b"Step ", b"|Loss: ")
    MEMORY = "most that PyTorch had reserved"

    def __init__(self) -> None:
        super().__init__()
        self._drawn: LogStep | None = None
        """The step of the newest bar, until the next one, or the line of the step, follows."""

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        for bar in BAR.finditer(line):
            step = float(bar[1])
            if self._drawn and self._drawn.values["step"] != step:
                yield from self.finish()
            drawn = find_bar(line)
            # A bar that is drawn again shows a later time.
            self._drawn = self._drawn or LogStep(
                {"step": step, "loss": parse_number(bar[2])}, time_s=drawn.time_s if drawn else None
            )
        for found, _, text in split_steps(START, line):
            values = {FIELDS[name]: parse_number(value) for name, value in VALUE.findall(text) if name in FIELDS}
            if "loss" not in values:
                raise LogLineError("no loss")
            step = float(found[1])
            time_s = self._drawn.time_s if self._drawn and self._drawn.values["step"] == step else None
            self._drawn = None
            yield LogStep({"step": step, **values}, time_s=time_s)

    def finish(self) -> Iterable[LogStep]:
        drawn, self._drawn = self._drawn, None
        return [drawn] if drawn else []


READER = TorchtuneReader

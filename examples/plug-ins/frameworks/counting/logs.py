"""Lines of `counting`: `count 3 loss 0.166667`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import StepReader

LINE = re.compile(rb"\bcount (\d+) loss ([\d.]+)")


class CountingReader(StepReader):
    """The framework `counting`."""

    NAME = "counting"
    TITLE = "counting"
    ANCHORS = (b"count ",)

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        found = LINE.search(line)
        if found:
            yield LogStep({"step": float(found[1]), "loss": float(found[2])})


READER = CountingReader

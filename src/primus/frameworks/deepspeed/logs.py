"""Lines of DeepSpeed: `step=N, skipped=K, lr=[...]`, the timer behind them, and `steps: N loss: ...` of pipelines.

Source: deepspeed/runtime/engine.py (`_report_progress`), deepspeed/utils/timer.py and runtime/pipe/engine.py. Only
pipelines print the loss. `SamplesPerSec` of old versions is an average since the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import parse_time_stamp
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import StepReader

PROGRESS = re.compile(rb"\bstep=(\d+), skipped=(\d+), lr=\[([-+.\de]+)")
TIMER = re.compile(rb"(?:global_step=(\d+)|\b\d+/\d+), (?:RunningAvg)?SamplesPerSec=([-+.\de]+)")
CURRENT_RATE = re.compile(rb"CurrSamplesPerSec=([-+.\de]+)")
MEMORY = re.compile(rb"MaxMemAllocated=([\d.]+)GB")
PIPELINE = re.compile(
    rb"\bsteps?: *(\d+)(?: */ *\d+)? loss: *([-+.\denaif]+) .*?iter time \(s\): *([\d.]+) samples/sec: *([\d.]+)"
)
"""Other losses may follow the first one."""


class DeepSpeedReader(StepReader):
    """DeepSpeed."""

    NAME = "deepspeed"
    TITLE = "DeepSpeed"
    PRECEDENCE = -1
    ANCHORS = (b"skipped=", b"SamplesPerSec=", b"samples/sec: ")
    MEMORY = "most that PyTorch had allocated"

    def __init__(self) -> None:
        super().__init__()
        self._waiting: LogStep | None = None
        """The step that the next lines may complete."""
        self._num_skipped = 0.0

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        progress = PROGRESS.search(line)
        if progress:
            total = float(progress[2])
            skipped, self._num_skipped = total - self._num_skipped, total
            values = {"learning_rate": float(progress[3]), "num_skipped": max(skipped, 0.0)}
            yield from self._complete_step(float(progress[1]), values, line)
        timer = TIMER.search(line)
        if timer:
            rate, memory = CURRENT_RATE.search(line), MEMORY.search(line)
            values = {"samples_per_s": float(rate[1] if rate else timer[2])}
            if memory:
                values["memory_gib"] = float(memory[1])
            # Micro steps count all passes: without `global_step` the line is of the step before it.
            if timer[1]:
                yield from self._complete_step(float(timer[1]), values, line)
            elif self._waiting is not None:
                self._waiting.values |= values
        pipeline = PIPELINE.search(line)
        if pipeline:
            step, loss, time_s, rate_text = map(float, pipeline.groups())
            yield from self._complete_step(
                step, {"loss": loss, "step_time_s": time_s, "samples_per_s": rate_text}, line
            )

    def finish(self) -> Iterable[LogStep]:
        if self._waiting is not None:
            yield self._waiting
        self._waiting = None

    def _complete_step(self, step: float, values: dict[str, float], line: bytes) -> Iterable[LogStep]:
        if self._waiting is None or self._waiting.values["step"] != step or values.keys() & self._waiting.values.keys():
            yield from self.finish()
            self._waiting = LogStep({"step": step}, time_s=parse_time_stamp(line))
        self._waiting.values |= values


READER = DeepSpeedReader

"""Lines of LitGPT: `Epoch 1 | iter 8 step 2 | loss train: 1.7, val: n/a | iter time: 121.17 ms (step)`.

Source: litgpt/pretrain.py and litgpt/finetune of Lightning-AI/litgpt, and their forms since 2023. An iteration is a
micro batch. A step is new in the line of the iteration that ends it; the lines between two steps are of iterations, and
repeat the step before. A step takes as many iterations as have passed since the last one; of those without a line,
the time is that of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import LogLineError, parse_number, split_steps
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

START = re.compile(rb"\biter (\d+) \|? ?st[eE]p (\d+)(?: \||:)(?= *loss)")
LOSS = re.compile(rb"loss(?: train(?: \(curr\))?)?:? +([-+.\deEnaif]+)")
TIME = re.compile(rb"iter time: *([\d.]+) ?ms")
EVALUATION = re.compile(rb"\b(?:iter|step) \d+: val loss *([-+.\deEnaif]+)|Final evaluation \| val loss: *([\d.]+)")


class LitGptReader(StepReader):
    """LitGPT."""

    NAME = "litgpt"
    TITLE = "LitGPT"
    ANCHORS = (b"iter time:", b"val loss")
    END = re.compile(rb"ms(?: \([a-z.]+\))?(?: remaining time: .*\d)?\s*$")

    def __init__(self) -> None:
        super().__init__()
        self._step = self._iteration = 0
        """The last step, and the iteration that ended it."""
        self._times_s: list[float] = []
        """Of iterations since then."""

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        evaluation = EVALUATION.search(line)
        if evaluation:
            yield LogEvaluation({"step": float(self._step), "loss": parse_number(evaluation[1] or evaluation[2])})
        for found, _, text in split_steps(START, line):
            loss, time = LOSS.search(text), TIME.search(text)
            if not loss or not time:
                raise LogLineError("no loss or no time")
            iteration, step = int(found[1]), int(found[2])
            self._times_s.append(parse_number(time[1]) / 1000)
            if step == self._step or step == 0:
                continue
            # A log that begins within a run, or again after a restart, does not show how many iterations a step has.
            if not 0 < self._step < step:
                iterations_per_step = max(1.0, round(iteration / step))
            else:
                iterations_per_step = (iteration - self._iteration) / (step - self._step)
            step_time_s = sum(self._times_s) / len(self._times_s) * iterations_per_step
            self._step, self._iteration, self._times_s = step, iteration, []
            yield LogStep({"step": float(step), "loss": parse_number(loss[1]), "step_time_s": step_time_s})


READER = LitGptReader

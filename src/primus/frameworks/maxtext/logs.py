"""Lines of MaxText: `completed step: N, seconds: ...`, before 2024 `step: N, seconds: ...`; its steps count from 0.

Source: metric_logger.py of AI-Hypercomputer/maxtext. TFLOP/s counts causal attention halved since July 2025
(maxtext#1988).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from primus.training_logs.line_values import LogLineError, parse_number, split_steps
from primus.training_logs.log_step import LogStep
from primus.training_logs.step_reader import LogEvaluation, StepReader

STEP = re.compile(rb"(?:completed step: *(?=\d+,)|\bstep: *(?=\d+, seconds: ))(\d+), *")
EVALUATION = re.compile(rb"[Cc]ompleted eval after train step (\d+), loss=([-+.\deEnaif]+)")
SETTING = re.compile(rb"Config param (\w+): (.*?)\s*$")
FIELDS = {
    b"seconds": "step_time_s",
    b"TFLOP/s/device": "tflops_per_device",
    b"TFLOP/s": "tflops_per_device",
    b"Tokens/s/device": "tokens_per_s_per_device",
    b"loss": "loss",
    b"moe_lb_loss": "load_balancing_loss",
    b"mtp_loss": "mtp_loss",
}
NEXT_TOKEN = (b"lm_loss", b"main_model_loss")
"""The loss without those of the router and of multi-token prediction, which `loss` contains."""


class MaxTextReader(StepReader):
    """MaxText."""

    NAME = "maxtext"
    TITLE = "MaxText"
    ANCHORS = (b"completed step: ", b", seconds: ", b"ompleted eval after")
    END = re.compile(rb"\.\d{3}\s*$")
    SETTING_ANCHORS = (b"Config param ",)

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        setting = SETTING.search(line)
        if setting:
            self.settings[setting[1].decode()] = setting[2].decode(errors="replace")
        evaluation = EVALUATION.search(line)
        if evaluation:
            yield LogEvaluation({"step": float(evaluation[1]) + 1, "loss": parse_number(evaluation[2])})
        for found, _, text in split_steps(STEP, line):
            texts = {name.strip(): value for name, _, value in (part.partition(b": ") for part in text.split(b", "))}
            values = {"step": float(found[1]) + 1}
            values |= {FIELDS[name]: parse_number(value) for name, value in texts.items() if name in FIELDS}
            next_token = next((texts[name] for name in NEXT_TOKEN if name in texts), None)
            if next_token:
                values["loss"] = parse_number(next_token)
            if "step_time_s" not in values or "loss" not in values:
                raise LogLineError("no time or no loss")
            yield LogStep(values)


READER = MaxTextReader

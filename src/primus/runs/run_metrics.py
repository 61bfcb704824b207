"""The numbers of a run as metrics for monitoring systems, from its events."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from primus.runs.events import Event

GIB = 1 << 30
STATES = ("starting", "running", "hanging", "restarting", "done", "failed", "interrupted")


class Metric(NamedTuple):
    """One number, by the conventions of Prometheus and OpenTelemetry: base units, totals for what only grows."""

    name: str
    """Without prefix, such as ``step_time_seconds``."""
    value: float
    unit: str
    """In UCUM, as OpenTelemetry has it; empty for plain numbers."""
    description: str
    kind: Literal["gauge", "counter"] = "gauge"


OF_STEPS = (
    ("step", "step", 1.0, "", "Optimizer steps taken"),
    ("loss", "loss", 1.0, "", "Training loss of the last step"),
    ("grad_norm", "grad_norm", 1.0, "", "Norm of the gradient before clipping"),
    ("learning_rate", "learning_rate", 1.0, "", "Learning rate"),
    ("step_time_seconds", "step_time_s", 1.0, "s", "Time of the last step"),
    ("data_time_seconds", "data_time_s", 1.0, "s", "Time that the last step waited for its batch"),
    ("tokens_per_second", "tokens_per_s", 1.0, "{token}/s", "Tokens per second of all devices"),
    ("tokens_per_second_per_device", "tokens_per_s_per_device", 1.0, "{token}/s", "Tokens per second of a device"),
    ("tflops_per_device", "tflops_per_device", 1.0, "", "TFLOP/s of a device, counted from the model"),
    ("mfu_ratio", "mfu", 1.0, "1", "Share of the dense peak of the device"),
    ("memory_bytes", "memory_gib", float(GIB), "By", "Peak memory of the first process"),
)
"""Name, field of the event, factor, unit and description of what a step reports."""
COUNTED = {
    "restart": ("restarts_total", "Restarts of the workers"),
    "hang": ("hangs_total", "Hangs that were detected"),
    "failure": ("failures_total", "Attempts that failed"),
    "rewind": ("rewinds_total", "Rewinds to an earlier checkpoint"),
    "straggler": ("stragglers_total", "Ranks that became slower than the others"),
    "checkpoint_saved": ("checkpoints_total", "Checkpoints that were written"),
    "checkpoint_failed": ("failed_checkpoints_total", "Checkpoints that could not be written"),
}
"""Metric and description by the kind of the events that it counts."""


class RunMetrics:
    """Follows the events of a run."""

    def __init__(self) -> None:
        self.state: str = "starting"
        """One of `STATES`."""
        self.last_step: Event = {}
        """The newest event of a step; empty before the first one."""
        self.train_iters = 0
        """Step at which the run ends; 0 before it is known."""
        self.started: Event = {}
        """The newest event `run_started`: device, backend and so on."""
        self._counts = dict.fromkeys(COUNTED, 0)
        self._skipped = 0
        self._tokens = 0
        self._validation_loss: float | None = None
        self._checkpoint_step: int | None = None

    def observe_event(self, event: Event) -> None:
        """Take an event into account; those of other kinds change nothing."""
        kind = event["kind"]
        if kind in COUNTED:
            self._counts[kind] += 1
        if kind == "step":
            self.state, self.last_step = "running", event
            self._tokens += int(_read_number(event, "tokens") or 0)
            self._skipped += bool(event.get("skipped"))
        elif kind == "run_started":
            self.state, self.started = "running", event
            self.train_iters = int(_read_number(event, "train_iters") or 0)
        elif kind in ("hang", "restart"):
            self.state = f"{kind}ing"
        elif kind == "run_ended":
            self.state = str(event.get("state"))
        elif kind == "eval":
            self._validation_loss = _read_number(event, "loss")
        elif kind == "checkpoint_saved":
            self._checkpoint_step = event.get("step")

    def list_metrics(self) -> Iterator[Metric]:
        """The metrics that are known; a loss that is not finite is NaN, as both systems have it."""
        is_healthy = self.state in ("starting", "running", "done")
        yield Metric("healthy", float(is_healthy), "", "1 while the run starts or trains, or is done")
        step = self.last_step
        for name, field, factor, unit, description in OF_STEPS:
            value = _read_number(step, field)
            if value is not None:
                yield Metric(name, value * factor, unit, description)
            elif step and field == "loss":
                yield Metric(name, math.nan, unit, description)
        if self.train_iters:
            yield Metric("train_iters", self.train_iters, "", "Optimizer steps of the whole run")
        if step:
            yield Metric("last_step_timestamp_seconds", step["time"], "s", "When the last step ended (Unix time)")
        if self._validation_loss is not None:
            yield Metric("validation_loss", self._validation_loss, "", "Loss of the last evaluation")
        if isinstance(self._checkpoint_step, int):
            yield Metric("checkpoint_step", self._checkpoint_step, "", "Step of the newest checkpoint")
        yield Metric("tokens_total", self._tokens, "{token}", "Tokens since the launch", "counter")
        yield Metric("skipped_steps_total", self._skipped, "", "Steps that changed nothing", "counter")
        for kind, (name, description) in COUNTED.items():
            yield Metric(name, self._counts[kind], "", description, "counter")


def _read_number(event: Event, field: str) -> float | None:
    value = event.get(field)
    return float(value) if isinstance(value, int | float) else None

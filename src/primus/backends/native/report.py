"""What a training run says while it trains: events, lines, the bar, and the loggers."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from primus.backends.native.bad_steps import BadStepDetector
from primus.backends.native.loggers import Logger, Scalars
from primus.backends.native.progress import ProgressBar
from primus.backends.native.step import SPIKE, StepResult
from primus.backends.native.step_line import StepReport, format_step_line
from primus.backends.native.timing import ComputeTime
from primus.runs.attempt import Attempt

GIB = 1 << 30
KIB = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What turns the time of a step into rates."""

    global_batch_size: int
    tokens: int
    """Of a global batch."""
    world: int
    """Devices that share it."""
    flops_per_token: float
    peak_tflops: float | None
    """Of one device in the training precision; None where it is not known."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched, and may still be running on the device."""

    number: int
    result: StepResult
    learning_rate: float
    consumed_samples: int
    data_time_s: float
    compute_time: ComputeTime | None = None


class TrainingReporter:
    """Takes the steps of a run and tells of them.

    On a GPU a step is read when the next one has been launched, so that the device never waits for the host.

    Args:
        attempt: Where lines and events go.
        train_iters: Steps of the run.
        log_interval: Steps between lines.
        watch: Sees every step, and ends the run where it cannot go on.
        rates: What turns time into rates.
        device: Of this process.
        loggers: Of the first process.
        bar: The progress bar, where one is shown.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        train_iters: int,
        log_interval: int,
        watch: BadStepDetector,
        rates: Rates,
        device: torch.device,
        loggers: Sequence[Logger],
        bar: ProgressBar | None,
    ) -> None:
        self.last: StepReport | None = None
        self.trained_s = 0.0
        """Time of all steps."""
        self.num_steps = 0
        """Steps that were told of; more than the run's where some were repeated."""
        self._attempt, self._rates, self._device = attempt, rates, device
        self._train_iters, self._log_interval = train_iters, log_interval
        self._watch = watch
        self._loggers, self._bar = loggers, bar
        self._launched: LaunchedStep | None = None
        self._unprinted: list[StepReport] = []
        self._mark = time.perf_counter()

    def print_line(self, text: str) -> None:
        """Print a line; on a terminal above the bar."""
        console = self._attempt.console
        if self._bar is None or console is None or not console.isatty():
            self._attempt.say(text)
            return
        print(text, flush=True)
        self._bar.print(text)

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._attempt.event(kind, **fields)

    def add_step(self, step: LaunchedStep) -> None:
        """Take a step that was launched.

        Raises:
            BadSteps: The run cannot go on from it.
        """
        launched, self._launched = self._launched, step
        if launched is not None:
            self._report_step(launched)
        if self._device.type == "cpu":
            self.flush()

    def flush(self) -> None:
        """Wait for the step that was launched last, and tell of it."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._report_step(launched)

    def discard_steps_after(self, step: int) -> None:
        """Forget what comes after `step`, which is going to be repeated."""
        self._launched = None
        self._unprinted.clear()
        for logger in self._loggers:
            logger.discard_steps_after(step)
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin the next step's time now: what came before was no training."""
        self._mark = time.perf_counter()

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Give numbers to the loggers."""
        for logger in self._loggers:
            logger.log_scalars(step, scalars)

    def close(self) -> None:
        """Take the bar away, and have the loggers write what they hold."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for logger in self._loggers:
            logger.close()

    def _report_step(self, step: LaunchedStep) -> None:
        is_first = self.last is None
        report = self._build_report(step)
        self.last = report
        self.trained_s += report.step_time_s
        self.num_steps += 1
        self.append_event("step", **report.build_event())
        self._attempt.beat("train", report.step, _collect_timings(report))
        self._unprinted.append(report)
        if self._is_printed(report.step, is_first):
            self.print_line(format_step_line(self._unprinted, self._train_iters, time.time()))
            self._unprinted.clear()
        if self._bar is not None:
            self._bar.update(report.step, f"loss {report.loss:.3f}  {report.tokens_per_s:,.0f} tokens/s")
        self.log_scalars(report.step, _collect_scalars(report))
        if is_first:
            self.restart_clock()  # the loggers were imported just now
        self._watch.observe_step(report)

    def _is_printed(self, step: int, is_first: bool) -> bool:
        return is_first or step % self._log_interval == 0 or step == self._train_iters

    def _build_report(self, step: LaunchedStep) -> StepReport:
        loss, grad_norm, skipped, _ = step.result.values.tolist()  # waits for the step, once
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        rates = self._rates
        per_device = rates.tokens / seconds / rates.world
        tflops = per_device * rates.flops_per_token / 1e12
        return StepReport(
            step=step.number,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=step.learning_rate,
            tokens=rates.tokens,
            consumed_samples=step.consumed_samples,
            global_batch_size=rates.global_batch_size,
            step_time_s=seconds,
            data_time_s=step.data_time_s,
            tokens_per_s=rates.tokens / seconds,
            tokens_per_s_per_device=per_device,
            tflops_per_device=tflops,
            mfu=tflops / rates.peak_tflops if rates.peak_tflops else None,
            memory_gib=_read_peak_memory(self._device) / GIB,
            skipped=skipped != 0.0,
            spike=skipped == SPIKE,
            compute_time_s=step.compute_time.seconds() if step.compute_time else None,
        )


def _collect_timings(report: StepReport) -> dict[str, float] | None:
    """What heartbeats say of a step; None where it was not measured."""
    if report.compute_time_s is None:
        return None
    return {"step_time_s": report.step_time_s, "compute_time_s": report.compute_time_s}


def _collect_scalars(report: StepReport) -> dict[str, float]:
    """Under the names that Megatron-LM gives them in TensorBoard where it has them."""
    named = {
        "lm loss": report.loss,
        "grad-norm": report.grad_norm,
        "learning-rate": report.learning_rate,
        "iteration-time": report.step_time_s,
        "tokens-per-second-per-device": report.tokens_per_s_per_device,
        "throughput": report.tflops_per_device,
        "memory-gib": report.memory_gib,
    }
    return named if report.mfu is None else {**named, "mfu": report.mfu}


def _read_peak_memory(device: torch.device) -> int:
    """Bytes; ru_maxrss is in KiB on Linux (getrusage(2))."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB

"""Measure the time of each step, and build the reports of steps."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from primus.backends.native.step import SPIKE, StepResult
from primus.callback import Callback, EvaluationReport, ProfileReport, StepReport
from primus.session.compute_timer import ComputeTime
from primus.session.rates import Rates, read_peak_host_memory


@dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched, and may still be running on the device."""

    number: int
    result: StepResult
    learning_rate: float
    consumed_samples: int
    data_time_s: float
    compute_time: ComputeTime | None = None


class StepTimer(Callback):
    """Measures the time from step to step, without evaluation, checkpoints and rewinds, and builds the reports.

    On a GPU a step is pending until the next one is launched: reading its numbers waits for it, and by then the device
    has more to do. At most one step is pending.

    Args:
        rates: What turns time into rates.
        device: Of this process.
    """

    def __init__(self, rates: Rates, device: torch.device) -> None:
        self.num_reports = 0
        self._rates, self._device = rates, device
        self._pending: LaunchedStep | None = None
        self._restarts = True
        """Whether the time since the last report is excluded: set by activities other than training, cleared by the
        next step."""
        self._mark, self._cpu_mark = time.perf_counter(), time.process_time()

    def before_step(self) -> None:
        if self._restarts:
            # The clock restarts at the next step, so that the time between is counted for none.
            self._mark, self._cpu_mark, self._restarts = time.perf_counter(), time.process_time(), False

    def after_evaluation(self, report: EvaluationReport) -> None:
        self._restarts = True

    def before_save(self) -> None:
        self._restarts = True

    def after_pause(self) -> None:
        self._restarts = True

    def after_profile(self, report: ProfileReport) -> None:
        # The interval that is being measured contains the writing.
        self._mark += report.time_s

    def after_rewind(self, step: int) -> None:
        """Forget the pending step, which is going to be repeated."""
        self._pending, self._restarts = None, True

    def add_step(self, launched: LaunchedStep) -> list[StepReport]:
        """Reports of the steps that can be read without leaving the device idle."""
        # The next step is queued on the device now, so reading the last one leaves it busy.
        ready = self.take_pending()
        self._pending = launched
        return ready + self.take_pending() if self._device.type == "cpu" else ready

    def take_pending(self) -> list[StepReport]:
        """The report of the pending step, if there is one; waits for the device."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [self._build_report(pending)]

    def _build_report(self, step: LaunchedStep) -> StepReport:
        loss, grad_norm, skipped, _ = step.result.values.tolist()  # waits for the step, once
        now, cpu_now = time.perf_counter(), time.process_time()
        seconds, cpu_seconds = now - self._mark, cpu_now - self._cpu_mark
        self._mark, self._cpu_mark = now, cpu_now
        # Loggers import their packages at the first report; this time must not count for the next step.
        self._restarts = self._restarts or self.num_reports == 0
        self.num_reports += 1
        return self._rates.build_report(
            step=step.number,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=step.learning_rate,
            consumed_samples=step.consumed_samples,
            step_time_s=seconds,
            cpu_time_s=cpu_seconds,
            data_time_s=step.data_time_s,
            compute_time_s=step.compute_time.seconds() if step.compute_time else None,
            memory_bytes=_read_peak_memory(self._device),
            skipped=skipped != 0.0,
            spike=skipped == SPIKE,
        )


def _read_peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return read_peak_host_memory()

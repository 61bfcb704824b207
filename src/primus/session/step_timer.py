"""Measure the time of each step, and build the reports of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from primus.callback import CONVENTION, Callback, EvaluationReport, ProfileReport, StepReport
from primus.machine.profile import find_peak_tflops
from primus.models.counts import flops_per_token
from primus.session.engine import RunningStep, StepValues
from primus.session.session import Session

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Factors that convert the time of a step into rates."""

    global_batch_size: int
    tokens: int
    """Of a global batch."""
    num_devices: int
    """Devices that share the batch."""
    flops_per_token: float
    peak_tflops: float | None
    """Of one device in the training precision; None if it is not known."""


def build_rates(session: Session) -> Rates:
    """The factors of the model, the batch and the devices of a run."""
    training, engine = session.trainer.training, session.engine
    return Rates(
        global_batch_size=session.global_batch_size,
        tokens=session.global_batch_size * training.seq_length,
        num_devices=engine.num_devices,
        flops_per_token=flops_per_token(session.trainer.model, training.seq_length, CONVENTION),
        peak_tflops=find_peak_tflops(engine.device_name, "bf16") if training.bf16 else None,
    )


@dataclass(frozen=True)
class TakenStep:
    """A step that an engine was asked to take, and may still be running on the device."""

    number: int
    outcome: StepValues | RunningStep
    learning_rate: float
    """That the engine was asked to apply."""
    consumed_samples: int
    data_time_s: float


class StepTimer(Callback):
    """Measures the time from step to step, without evaluation, checkpoints and rewinds, and builds the reports.

    A running step is pending until the next one is launched: reading its numbers waits for it, and by then the device
    has more to do. At most one step is pending.

    Args:
        rates: What turns time into rates.
        read_memory: Gives the peak memory of this process in bytes.
    """

    def __init__(self, rates: Rates, read_memory: Callable[[], int]) -> None:
        self.num_reports = 0
        self.rates, self._read_memory = rates, read_memory
        self._pending: TakenStep | None = None
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

    def add_step(self, taken: TakenStep) -> list[StepReport]:
        """Reports of the steps that can be read without leaving the device idle."""
        # The next step is queued on the device now, so reading the last one leaves it busy.
        ready = self.take_pending()
        self._pending = taken
        return ready + self.take_pending() if isinstance(taken.outcome, StepValues) else ready

    def take_pending(self) -> list[StepReport]:
        """The report of the pending step, if there is one; waits for the device."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [self._build_report(pending)]

    def _build_report(self, taken: TakenStep) -> StepReport:
        outcome = taken.outcome
        values = outcome if isinstance(outcome, StepValues) else outcome.read()
        now, cpu_now = time.perf_counter(), time.process_time()
        seconds, cpu_seconds = now - self._mark, cpu_now - self._cpu_mark
        self._mark, self._cpu_mark = now, cpu_now
        # Loggers import their packages at the first report; this time must not count for the next step.
        self._restarts = self._restarts or self.num_reports == 0
        self.num_reports += 1
        rates = self.rates
        per_device = rates.tokens / seconds / rates.num_devices
        tflops = per_device * rates.flops_per_token / 1e12
        return StepReport(
            step=taken.number,
            loss=values.loss,
            grad_norm=values.grad_norm,
            learning_rate=taken.learning_rate if values.learning_rate is None else values.learning_rate,
            tokens=rates.tokens,
            consumed_samples=taken.consumed_samples,
            global_batch_size=rates.global_batch_size,
            step_time_s=seconds,
            data_time_s=taken.data_time_s,
            tokens_per_s=rates.tokens / seconds,
            tokens_per_s_per_device=per_device,
            tflops_per_device=tflops,
            mfu=tflops / rates.peak_tflops if rates.peak_tflops else None,
            memory_gib=self._read_memory() / GIB,
            skipped=values.skipped,
            spike=values.spike,
            overflow=values.overflow,
            compute_time_s=values.compute_time_s,
            cpu_time_s=cpu_seconds,
        )

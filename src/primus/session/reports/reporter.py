"""Events, lines, the progress bar and loggers: everything that a training run reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from primus.callback import Callback, EvaluationReport, ProfileReport, SavedCheckpoint, StepReport
from primus.launch.progress_bar import ProgressBar
from primus.process import measure_core_wait
from primus.runs.attempt import Attempt
from primus.runs.step_line import format_evaluation_line, format_step_line, shorten_line
from primus.session.checkpoints.saver import FailedCheckpoint
from primus.session.reports.loggers import Logger, Scalars


class TrainingReporter(Callback):
    """Reports the steps, evaluations and checkpoints of a run.

    Args:
        attempt: Where lines and events go.
        train_iters: Steps of the run.
        log_interval: Steps between lines.
        log_format: Whether the user sees short or long lines; `auto` is short on a terminal.
        loggers: Of the first process.
        bar: The progress bar, if one is shown.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        train_iters: int,
        log_interval: int,
        log_format: str,
        loggers: Sequence[Logger],
        bar: ProgressBar | None,
    ) -> None:
        self._attempt = attempt
        self._train_iters, self._log_interval = train_iters, log_interval
        self._log_format, self._loggers, self._bar = log_format, loggers, bar
        self._last: StepReport | None = None
        self._trained_s = 0.0
        """Time of all steps."""
        self._num_steps = 0
        """Steps that were reported; more than the run's if some were repeated."""
        self._unprinted: list[StepReport] = []

    def print_line(self, text: str) -> None:
        """Print a line: whole to the log of the rank, and to the user in the format that was chosen."""
        console = self._attempt.console
        if self._bar is None or console is None or not console.isatty():
            self._attempt.say(text, shorten_line(text) if self._log_format == "short" else text)
            return
        # Not to the console, which is a terminal: it belongs to the bar until that is closed.
        print(text, flush=True)
        self._bar.print(text if self._log_format == "long" else shorten_line(text, self._bar.width))

    def append_event(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._attempt.event(kind, **fields)

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Give numbers to the loggers."""
        for logger in self._loggers:
            logger.log_scalars(step, scalars)

    def after_report(self, report: StepReport) -> None:
        is_first = self._last is None
        self._last = report
        self._trained_s += report.step_time_s
        self._num_steps += 1
        self.append_event("step", **structs.asdict(report))
        self._attempt.beat("train", report.step, _collect_timings(report))
        self._unprinted.append(report)
        if is_first or report.step % self._log_interval == 0 or report.step == self._train_iters:
            self.print_line(format_step_line(self._unprinted, self._train_iters, time.time()))
            self._unprinted.clear()
        if self._bar is not None:
            self._bar.update(report.step, f"loss {report.loss:.3f}  {report.tokens_per_s:,.0f} tokens/s")
        self.log_scalars(report.step, _collect_scalars(report))

    def after_evaluation(self, report: EvaluationReport) -> None:
        numbers = {"step": report.step, "loss": report.loss, "perplexity": report.perplexity, "tokens": report.tokens}
        if report.data == "test":
            self.print_line(
                f"test loss after the last step: {report.loss:.4f}, perplexity {report.perplexity:.4g},"
                f" {report.tokens:,} tokens"
            )
            self.append_event("test", **numbers)
            return
        self.print_line(format_evaluation_line(report.step, report.loss, report.perplexity, time.time()))
        self.append_event("eval", **numbers, time_s=report.time_s)
        scalars = {"lm loss validation": report.loss, "lm loss validation ppl": report.perplexity}
        self.log_scalars(report.step, scalars)

    def after_save(self, saved: SavedCheckpoint) -> None:
        self.print_line(f"checkpoint {saved.folder.name} saved: {saved.total_bytes / 1e6:.0f} MB")
        self.append_event(
            "checkpoint_saved",
            step=saved.step,
            name=saved.folder.name,
            bytes=saved.total_bytes,
            time_s=round(saved.seconds, 3),
            wait_s=round(saved.wait_s, 3),
        )

    def report_failed_save(self, limit: int, failed: FailedCheckpoint) -> None:
        """Report a checkpoint that could not be written; the run fails after `limit` in a row."""
        left = limit - failed.num_failed
        others = f"the run fails after {left} more" if left else f"the last of {limit} in a row: the run fails"
        self.print_line(f"{failed.error.problem} ({others})")
        self.append_event(
            "checkpoint_failed", step=failed.step, problem=failed.error.problem, failed_in_a_row=failed.num_failed
        )

    def report_wait_for_save(self, step: int) -> None:
        """Report that training waits, because the checkpoint of `step` is still being written."""
        self.print_line(f"the disk is slow: training waits for the checkpoint of step {step}, and the next one is due")

    def after_profile(self, report: ProfileReport) -> None:
        steps = f"steps {report.first_step} to {report.last_step}"
        self.print_line(f"profile of {steps} written: {report.files[0]}{_count_others(report.files)}")
        self.append_event("profile", **structs.asdict(report))

    def after_rewind(self, step: int) -> None:
        """Discard the steps after `step`, which are repeated."""
        # Lines that were not printed yet would average discarded steps with their repetitions.
        self._unprinted.clear()
        for logger in self._loggers:
            logger.discard_steps_after(step)

    def after_train(self) -> None:
        """The summary."""
        last, steps, seconds = self._last, self._num_steps, self._trained_s
        assert last is not None, "at least one step was taken"
        tokens = steps * last.tokens
        self.print_line(
            f"{steps:,} steps, {tokens:,} tokens in {_format_duration(seconds)}:"
            f" {tokens / seconds:,.0f} tokens/s, final loss {last.loss:.4f}"
        )
        self.append_event(
            "training_ended",
            step=last.step,
            steps=steps,
            tokens=tokens,
            time_s=round(seconds, 3),
            tokens_per_s=tokens / seconds,
            loss=last.loss,
            core_wait_share=measure_core_wait(),
        )

    def close(self) -> None:
        """Remove the bar, and flush the loggers."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for logger in self._loggers:
            logger.close()


def _collect_timings(report: StepReport) -> dict[str, float] | None:
    """The times of a step that heartbeats carry; None if they were not measured."""
    if report.compute_time_s is None:
        return None
    return {"step_time_s": report.step_time_s, "compute_time_s": report.compute_time_s}


def _collect_scalars(report: StepReport) -> dict[str, float]:
    """The numbers of a step under Megatron-LM's TensorBoard names, if it has them."""
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


def _count_others(files: Sequence[str]) -> str:
    return f" and {len(files) - 1} more" if len(files) > 1 else ""


def _format_duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"

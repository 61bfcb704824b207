"""The lines of steps and evaluations: for logs as parsers of Megatron-LM's logs read them, and short for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from primus.callback import StepReport


def format_step_line(reports: Sequence[StepReport], train_iters: int, now: float) -> str:
    """The line of the steps since the last one; times and losses are means over those that were not skipped.

    Names and number formats are those of Megatron-LM `training_log` (megatron/training/training.py) where it has the
    value; tokens/s is total tokens over total time.
    """
    last = reports[-1]
    counted = [report for report in reports if not report.skipped] or list(reports)
    seconds = sum(report.step_time_s for report in reports)
    share = len(reports) * last.step_time_s / seconds  # of the last step's rate that the mean rate is
    segments = [
        f"iteration {last.step:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {1000 * seconds / len(reports):.1f}",
        f"tokens/s/device: {share * last.tokens_per_s_per_device:.1f}",
        f"compute per device (TFLOP/s, {last.flops_convention}): {share * last.tflops_per_device:.3f}",
        f"MFU: {'-' if last.mfu is None else f'{share * last.mfu:.1%}'}",
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        f"lm loss: {_compute_mean(report.loss for report in counted):.6E}",
        f"grad norm: {last.grad_norm:.3f}",
        f"number of skipped iterations: {sum(report.skipped for report in reports):3d}",
    ]
    return f" [{_format_clock(now)}] " + " | ".join(segments) + " |"


def format_short_step_line(reports: Sequence[StepReport], train_iters: int, width: int) -> str:
    """The line of the same steps for a terminal: as many of its values, most important first, as `width` has room
    for."""
    last = reports[-1]
    counted = [report for report in reports if not report.skipped] or list(reports)
    seconds = sum(report.step_time_s for report in reports)
    num_skipped = sum(report.skipped for report in reports)
    share = len(reports) * last.step_time_s / seconds
    values = [
        f"step {last.step:{len(str(train_iters))}d}/{train_iters}",
        f"loss {_compute_mean(report.loss for report in counted):.4f}",
        *([f"{num_skipped} skipped"] if num_skipped else []),
        f"{share * last.tokens_per_s:,.0f} tokens/s",
        f"{seconds / len(reports):.3g} s/step",
        f"grad norm {last.grad_norm:.3g}",
        f"lr {last.learning_rate:.3g}",
        *([] if last.mfu is None else [f"MFU {share * last.mfu:.1%}"]),
        f"{share * last.tflops_per_device:.3g} TFLOP/s/device",
    ]
    line = values[0]
    for value in values[1:]:
        if len(line) + 2 + len(value) > width:
            break
        line += f"  {value}"
    return line


def format_evaluation_line(step: int, loss: float, perplexity: float, now: float) -> str:
    """The line of an evaluation, in the words of Megatron-LM `evaluate_and_print_results`."""
    return (
        f" [{_format_clock(now)}] validation loss at iteration {step} | lm loss value: {loss:.6E}"
        f" | lm loss PPL: {perplexity:.6E} |"
    )


def _compute_mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _format_clock(now: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))

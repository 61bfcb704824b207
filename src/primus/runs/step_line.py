"""The lines of steps and evaluations: for logs as parsers of Megatron-LM's logs read them, and short for a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from msgspec import Struct

from primus.callback import StepReport
from primus.runs.run_progress import format_duration


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
        f"memory per device (GiB): {last.memory_gib:.2f}",
    ]
    return f" [{_format_clock(now)}] " + " | ".join(segments) + " |"


def format_evaluation_line(step: int, loss: float, perplexity: float, now: float) -> str:
    """The line of an evaluation, in the words of Megatron-LM `evaluate_and_print_results`."""
    return (
        f" [{_format_clock(now)}] validation loss at iteration {step} | lm loss value: {loss:.6E}"
        f" | lm loss PPL: {perplexity:.6E} |"
    )


_STEP = re.compile(r" \[[^]]+\] iteration +(\d+)/ *(\d+) \| (.*) \|")
_EVALUATION = re.compile(
    r" \[[^]]+\] validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|"
)


class ShownStep(Struct, frozen=True):
    """What the line of a step says, for a terminal."""

    step: int
    train_iters: int
    values: tuple[str, ...]
    """Most important first: loss, rate and so on, each with its name or unit."""

    def format_line(self, width: int) -> str:
        """The step, and as many of the values as `width` has room for."""
        line = f"step {self.step:{len(str(self.train_iters))}d}/{self.train_iters}"
        for value in self.values:
            if len(line) + 2 + len(value) > width:
                break
            line += f"  {value}"
        return line


def read_step_line(line: str) -> ShownStep | None:
    """Read a line of `format_step_line`; None for other lines."""
    match = _STEP.fullmatch(line)
    if not match:
        return None
    step, train_iters = int(match[1]), int(match[2])
    values = dict(segment.split(": ", 1) for segment in match[3].split(" | "))
    number = {name.partition(" (")[0]: float(value) for name, value in values.items() if name != "MFU"}
    num_skipped, seconds = number["number of skipped iterations"], number["elapsed time per iteration"] / 1000
    return ShownStep(
        step,
        train_iters,
        (
            f"loss {number['lm loss']:.4f}",
            *([f"{num_skipped:.0f} skipped"] if num_skipped else []),
            f"{number['tokens/s/device']:,.0f} tokens/s/device",
            f"{number['memory per device']:.3g} GiB",
            f"{format_duration(seconds * (train_iters - step))} left",
            f"{seconds:.3g} s/step",
            f"grad norm {number['grad norm']:.3g}",
            f"lr {number['learning rate']:.3g}",
            *([] if values["MFU"] == "-" else [f"MFU {values['MFU']}"]),
            f"{number['compute per device']:.3g} TFLOP/s/device",
        ),
    )


WIDTH_OF_SHORT_LINES = 100
"""Columns of a short line where there is no terminal: all values up to the norm of the gradient."""


def shorten_line(line: str, width: int = WIDTH_OF_SHORT_LINES) -> str:
    """The line of a step or an evaluation for a terminal of `width` columns; another line as it is."""
    if step := read_step_line(line):
        return step.format_line(width)
    if match := _EVALUATION.fullmatch(line):
        return f"validation loss at step {match[1]}: {float(match[2]):.4f}, perplexity {float(match[3]):.4g}"
    return line


def _compute_mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _format_clock(now: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))

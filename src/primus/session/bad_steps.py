"""Detection of steps whose loss is not finite or a spike, and the policy that follows: skip, rewind or stop."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

from primus.callback import Callback, StepReport
from primus.config.schema import TrainingConfig
from primus.errors import FinalError

SUGGESTION = (
    "likely a learning rate that is too high or a warm-up that is too short, or damaged data: lower lr, raise"
    " lr_warmup_iters, or resume from an earlier checkpoint with another seed"
)

SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation (1 / Phi^-1(3/4))."""


class BadSteps(FinalError):
    """Steps that the run cannot continue from; they end it, unless the policy is to rewind.

    Args:
        first: The first bad step; a checkpoint of a step before it is good.
        last: The last one seen; the data up to it is skipped by a rewind.
        answer: Reaction of the policy.
        reason: Description of the problem.
    """

    def __init__(self, first: int, last: StepReport, answer: Literal["rewind", "stop"], reason: str) -> None:
        super().__init__(reason, SUGGESTION)
        self.first, self.last, self.answer = first, last, answer
        self.is_spike = last.spike


class ReplaceableLosses(Protocol):
    """The losses by which a framework finds spikes."""

    def replace(self, losses: Sequence[float], /) -> None:
        """Replace them by `losses`, oldest first."""


class BadStepDetector(Callback):
    """Judges every step of a run by the policies; every process must give it the same steps.

    Args:
        config: Has the policies.
        window: Finds spikes during the step; None if the policy ignores them.
    """

    def __init__(self, config: TrainingConfig, window: ReplaceableLosses | None = None) -> None:
        self._config, self._nonfinite = config, 0
        self._window = window
        self._recent: deque[tuple[int, float]] = deque(maxlen=config.loss_spike_window)

    @property
    def losses(self) -> list[float]:
        """The losses in the window, oldest first; empty if spikes are not detected."""
        return [loss for _, loss in self._recent]

    def restart_after(self, step: int, losses: Sequence[float]) -> None:
        """Continue after `step` with the window as it was then."""
        self._nonfinite = 0
        self._recent.clear()
        if self._window is not None:
            self._recent.extend((step - len(losses) + index, loss) for index, loss in enumerate(losses, start=1))
            self._window.replace(self.losses)

    def after_report(self, report: StepReport) -> None:
        """Judge a step by the policies.

        Raises:
            BadSteps: The run cannot continue from it.
        """
        # Without this step: the message and the start of the spike compare it with the steps before.
        before = list(self._recent)
        # The same rule as on the device, so that a restored window decides the same.
        if self._window is not None and math.isfinite(report.loss):
            self._recent.append((report.step, report.loss))
        # A spike is finite, so it ends a series of steps that are not; after an overflow the loss scale is lower.
        is_nonfinite = report.skipped and not (report.spike or report.overflow)
        self._nonfinite = self._nonfinite + 1 if is_nonfinite else 0
        if is_nonfinite:
            self._observe_nonfinite(report)
            return
        answer = self._config.loss_spike_policy
        if report.spike and (answer == "rewind" or answer == "stop"):
            reason = f"step {report.step}: a loss spike: {_describe_spike(report, before)}"
            raise BadSteps(
                find_spike_begin(report.step, before, self._config.loss_spike_factor), report, answer, reason
            )

    def _observe_nonfinite(self, report: StepReport) -> None:
        policy = self._config.nonfinite_policy
        limit = 1 if policy == "stop" else self._config.max_nonfinite_steps
        if self._nonfinite < limit:
            return
        first = report.step - self._nonfinite + 1
        which = f"steps {first} to {report.step}" if first < report.step else f"step {first}"
        reason = (
            f"{which}: the loss or the gradient is not finite (loss {report.loss}, grad norm {report.grad_norm});"
            " the weights are as before"
        )
        raise BadSteps(first, report, "rewind" if policy == "rewind" else "stop", reason)


def _describe_spike(report: StepReport, before: Sequence[tuple[int, float]]) -> str:
    losses = sorted(loss for _, loss in before)
    return f"{report.loss:.4f}, after a median of {losses[(len(losses) - 1) // 2]:.4f} in the last {len(losses)} steps"


def find_spike_begin(spike: int, before: Sequence[tuple[int, float]], factor: float) -> int:
    """The step at which a spike began: the first of the unbroken series that was already half as far up.

    Args:
        spike: Step of the spike.
        before: The steps before it, in order, with their losses.
        factor: Of the threshold.
    """
    losses = [loss for _, loss in before]
    median = statistics.median_low(losses)
    deviation = SIGMA_PER_MAD * statistics.median_low(abs(loss - median) for loss in losses)
    first = spike
    for step, loss in reversed(before):
        if loss <= median + factor / 2 * deviation:
            break
        first = step
    return first

"""Whether the loss of a step is a spike: far above the losses before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from primus.session.bad_steps import SIGMA_PER_MAD


class LossWindow:
    """The last finite losses of a run, on the device, where spikes are detected without making the host wait.

    A spike is above median + factor x standard deviation, both of the losses in the window; the deviation is estimated
    by the median of absolute deviations, so that a spike which has entered the window does not hide the next one.
    The number of losses and the factor are those of OLMo-core's SkipStepOptimizer, which takes mean and standard
    deviation (github.com/allenai/OLMo-core, src/olmo_core/optim/skip_step_optimizer.py). Spikes enter the window too:
    a loss that stays at a new level counts as a spike for at most half a window.

    Args:
        size: Number of losses; until there are as many, no loss is a spike.
        factor: See above.
        device: Of the losses.
    """

    def __init__(self, size: int, factor: float, device: torch.device) -> None:
        self.size, self.factor = size, factor
        self._losses = torch.full((size,), math.nan, dtype=torch.float32, device=device)

    def add_loss(self, loss: Tensor) -> Tensor:
        """Whether `loss`, float32 and the same in all processes, is a spike; it then belongs to the window if finite.

        The processes decide alike because an all-reduce leaves the same bits in each of them.
        """
        median, deviation = _compute_median_and_deviation(self._losses)
        is_spike = (deviation > 0) & (loss > median + self.factor * deviation)  # false while there is a NaN
        # No branch on a value: `where` keeps the decision on the device.
        pushed = torch.cat([self._losses[1:], loss.reshape(1)])
        self._losses = torch.where(loss.isfinite(), pushed, self._losses)
        return is_spike & loss.isfinite()

    def replace(self, losses: Sequence[float]) -> None:
        """Replace the window by `losses`, oldest first."""
        kept = [*([math.nan] * self.size), *losses][-self.size :]
        self._losses = torch.tensor(kept, dtype=torch.float32, device=self._losses.device)


def _compute_median_and_deviation(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Sort, which does not wait for the device; with a NaN, which is sorted last, both results are NaN."""
    middle = (losses.numel() - 1) // 2
    ordered = losses.sort().values
    median = ordered[middle] + 0.0 * ordered[-1]
    deviation = SIGMA_PER_MAD * (losses - median).abs().sort().values[middle]
    return median, deviation

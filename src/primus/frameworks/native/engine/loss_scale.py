"""The dynamic loss scale of float16, whose smallest gradients would otherwise be zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from primus.frameworks.native.training_settings import TrainingSettings

GROWTH, BACKOFF = 2.0, 0.5
"""Factors of a growing and of a falling scale (Megatron-LM, megatron/core/optimizer/grad_scaler.py)."""


class LossScale:
    """The scale, changed on the device so that the host does not wait, by the rule of Megatron-LM's DynamicGradScaler.

    A step that overflows is skipped. After `hysteresis` of them the scale is halved; after `loss_scale_window` steps
    without one it doubles, and `hysteresis` begins again.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self._settings = settings
        first = [settings.initial_loss_scale, 0.0, float(settings.hysteresis)]
        self.state = torch.tensor(first, dtype=torch.float64, device=device)
        """[scale, steps since it grew or a step overflowed, overflows until it falls]; a checkpoint has it."""

    @property
    def value(self) -> Tensor:
        return self.state[0]

    def can_fall(self) -> Tensor:
        return self.state[0] > self._settings.min_loss_scale

    def update(self, overflows: Tensor, skipped: Tensor) -> None:
        """After a step that overflows, or is skipped for another reason, or was applied."""
        scale, steps, left = self.state.unbind()
        steps, left = torch.where(overflows, 0.0, steps + 1), left - overflows.double()
        falls = overflows & (left <= 0)
        grows = steps >= self._settings.loss_scale_window
        fallen = (scale * BACKOFF).clamp_min(self._settings.min_loss_scale)
        scale = torch.where(falls, fallen, torch.where(grows, scale * GROWTH, scale))
        left = torch.where(grows, float(self._settings.hysteresis), left)
        changed = torch.stack((scale, torch.where(grows, 0.0, steps), left))
        self.state.copy_(torch.where(skipped & ~overflows, self.state, changed))

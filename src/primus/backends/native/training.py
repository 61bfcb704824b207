"""The state of a run in training, which the trainer, its recovery and callbacks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from primus.backends.native.rewind import Rewind
from primus.backends.native.spikes import LossWindow
from primus.backends.native.step import Trainable
from primus.backends.native.step_timer import StepTimer
from primus.session.compute_timer import ComputeTimer
from primus.session.session import Session
from primus.session.torch_processes import TorchProcesses


@dataclass(kw_only=True)
class Training(Session):
    """A session that is ready for its next step; a `primus.callback.TrainingView` for callbacks."""

    processes: TorchProcesses
    trainable: Trainable
    optimizer: torch.optim.AdamW
    loss_window: LossWindow | None
    """Finds loss spikes on the device; None if the policy ignores them."""
    step_timer: StepTimer
    compute_timer: ComputeTimer
    rewinds: list[Rewind]
    """Of all attempts."""
    compiled: bool
    initial_callback_state: Mapping[str, Any] = field(default_factory=dict)
    """State of the callbacks before the first step, for a rewind to the initial weights."""

    @property
    def model(self) -> torch.nn.Module:
        return self.trainable.model

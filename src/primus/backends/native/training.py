"""The state of a run in training, which the trainer, its recovery and callbacks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from primus.backends.native.bad_steps import BadStepDetector
from primus.backends.native.checkpoint import CheckpointSaver
from primus.backends.native.distributed import Processes
from primus.backends.native.report import TrainingReporter
from primus.backends.native.resume import CheckpointSearch
from primus.backends.native.rewind import Rewind
from primus.backends.native.step import Trainable
from primus.backends.native.step_timer import StepTimer
from primus.backends.native.timing import ComputeTimer
from primus.callback import CallbackList
from primus.config.schema import Experiment
from primus.data.training.dataset import Datasets
from primus.runs.attempt import Attempt


@dataclass
class Training:
    """A run that is ready for its next step; a `primus.callback.TrainingView` for callbacks."""

    experiment: Experiment
    attempt: Attempt
    processes: Processes
    data: Datasets
    trainable: Trainable
    optimizer: torch.optim.AdamW
    callbacks: CallbackList
    reporter: TrainingReporter
    saver: CheckpointSaver
    search: CheckpointSearch
    """Finds checkpoints to rewind to."""
    bad_steps: BadStepDetector
    step_timer: StepTimer
    compute_timer: ComputeTimer
    rewinds: list[Rewind]
    """Of all attempts."""
    compiled: bool
    global_batch_size: int
    step: int
    """Steps taken."""
    consumed_samples: int
    """Samples that they took, or that a rewind skipped."""
    evaluated_step: int | None = None
    """Step of the last evaluation on validation data."""
    stop_reason: str | None = None
    """Why a callback wants the training to end after this step."""
    initial_callback_state: Mapping[str, Any] = field(default_factory=dict)
    """State of the callbacks before the first step, for a rewind to the initial weights."""

    @property
    def model(self) -> torch.nn.Module:
        return self.trainable.model

    def request_stop(self, reason: str) -> None:
        """End the training after this step as if it were the last."""
        self.stop_reason = self.stop_reason or reason

    def print_line(self, text: str) -> None:
        self.reporter.print_line(text)

    def append_event(self, kind: str, **fields: Any) -> None:
        self.reporter.append_event(kind, **fields)

    def log_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self.reporter.log_scalars(step, scalars)

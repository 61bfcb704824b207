"""Counts instead of training, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.config.schema import Experiment
from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt


def check(experiment: Experiment) -> None:
    """Take anything but the model with seven layers."""
    if experiment.trainer.model.num_layers == 7:
        raise UsageError("the abacus has no seven layers")


def train(experiment: Experiment, attempt: Attempt) -> None:
    """One step event for each step, whose loss comes from the seed."""
    seed = experiment.trainer.training.seed
    attempt.event("run_started", attempt=attempt.number)
    for step in range(1, experiment.trainer.training.train_iters + 1):
        attempt.event("step", step=step, loss=seed / step, tokens_per_s=100.0, grad_norm=1.0, learning_rate=0.1)

"""Count instead of training: the smallest framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt

KEYS = {"stride"}


def check(experiment: Experiment) -> None:
    """Refuse a stride that is not a positive number."""
    stride = experiment.trainer.backend_args.get("stride", 1)
    if not isinstance(stride, int) or stride < 1:
        raise UsageError(f"stride: {stride}: must be a positive integer", "remove it to count by 1")


def train(experiment: Experiment, attempt: Attempt) -> None:
    """One heartbeat and one event a step; stop early where a signal asks for it."""
    stride = experiment.trainer.backend_args.get("stride", 1)
    for step in range(1, (experiment.trainer.training.train_iters or 0) + 1):
        attempt.beat("train", step)
        attempt.event("step", step=step, loss=1 / (stride * step))
        attempt.say(f"count {step} loss {1 / (stride * step):.6f}")
        if attempt.stop_signal:
            return

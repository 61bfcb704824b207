"""Fine-tune a model on instructions: all weights, or adapters (LoRA)."""

from __future__ import annotations

from primus.plan import LaunchJob
from primus.task import TaskContext
from primus.tasks.train._training import TrainingOptions, TrainingTask, train_rank

OVERRIDES = True
TASK = TrainingTask("train posttrain", "post_trainer", "examples/posttrain/quickstart.yaml")


class Options(TrainingOptions, frozen=True, kw_only=True):
    """Options of `train posttrain`."""


def prepare(options: Options, context: TaskContext) -> LaunchJob | None:
    """The job of a training run; None if hipBLASLt is tuned instead."""
    return TASK.prepare(options, context)


def run(options: Options, context: TaskContext) -> int:
    """Train, and report how the run ended."""
    return TASK.run(options, context)


work = train_rank

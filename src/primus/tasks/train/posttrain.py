"""Fine-tune a model on instructions: all weights, or adapters (LoRA)."""

from __future__ import annotations

from primus.tasks.train._training import TrainingOptions, TrainingTask, train_rank

OVERRIDES = True
TASK = TrainingTask("train posttrain", "post_trainer", "examples/posttrain/quickstart.yaml")


class Options(TrainingOptions, frozen=True, kw_only=True):
    """Options of `train posttrain`."""


prepare, run, work = TASK.prepare, TASK.run, train_rank

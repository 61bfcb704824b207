"""Train a model from scratch, or resume its training."""

from __future__ import annotations

from primus.tasks.train._training import TrainingOptions, TrainingTask, train_rank

OVERRIDES = True
TASK = TrainingTask("train pretrain", "pre_trainer", "examples/quickstart.yaml")


class Options(TrainingOptions, frozen=True, kw_only=True):
    """Options of `train pretrain`."""


prepare, run, work = TASK.prepare, TASK.run, train_rank

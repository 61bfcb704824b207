"""Train a model on rewards of what it generates (GRPO, DAPO, Dr. GRPO, GSPO)."""

from __future__ import annotations

from primus.tasks.train._training import TrainingOptions, TrainingTask, train_rank

OVERRIDES = True
TASK = TrainingTask("train rl", "rl_trainer", "examples/posttrain/quickstart-grpo.yaml")


class Options(TrainingOptions, frozen=True, kw_only=True):
    """Options of `train rl`."""


prepare, run, work = TASK.prepare, TASK.run, train_rank

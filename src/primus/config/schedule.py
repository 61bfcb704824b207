"""Derive the learning-rate schedule and the evaluation interval from the configuration."""

from __future__ import annotations

from primus.config.schema import OptimizerConfig, TrainingConfig


def decay_end(config: OptimizerConfig, train_iters: int) -> int:
    """Step at which the decay of the learning rate ends."""
    return config.lr_decay_iters or train_iters


def warmup_steps(config: OptimizerConfig, train_iters: int) -> int:
    """Steps of warm-up: `lr_warmup_fraction` of the decay steps where it is given, else `lr_warmup_iters`."""
    if config.lr_warmup_fraction is None:
        return config.lr_warmup_iters
    return int(config.lr_warmup_fraction * decay_end(config, train_iters))


def final_learning_rate(config: OptimizerConfig) -> float:
    """The learning rate at the end of the decay: `min_lr_ratio` of `lr` where it is given, else `min_lr`."""
    return config.min_lr if config.min_lr_ratio is None else config.min_lr_ratio * config.lr


def evaluation_interval(training: TrainingConfig) -> int | None:
    """Steps between evaluations; None without evaluation."""
    return training.eval_interval if training.eval_iters else None

"""The learning-rate schedule and the evaluation interval that follow from the configuration."""

from __future__ import annotations

import math

from primus.config.schema import OptimizerConfig, TrainingConfig


def find_decay_end(config: OptimizerConfig, train_iters: int) -> int:
    """Step at which the decay of the learning rate ends."""
    return config.lr_decay_iters or train_iters


def warmup_steps(config: OptimizerConfig, train_iters: int) -> int:
    """Steps of warm-up: `lr_warmup_fraction` of the decay steps where it is given, else `lr_warmup_iters`."""
    if config.lr_warmup_fraction is None:
        return config.lr_warmup_iters
    return int(config.lr_warmup_fraction * find_decay_end(config, train_iters))


def count_wsd_decay_steps(config: OptimizerConfig, train_iters: int) -> int:
    """Steps of the last phase of WSD; Megatron-LM has no default, here it is a fifth of the steps after warm-up."""
    if config.lr_wsd_decay_iters is not None:
        return config.lr_wsd_decay_iters
    return (find_decay_end(config, train_iters) - warmup_steps(config, train_iters)) // 5


def find_final_learning_rate(config: OptimizerConfig) -> float:
    """The learning rate at the end of the decay: `min_lr_ratio` of `lr` where it is given, else `min_lr`."""
    return config.min_lr if config.min_lr_ratio is None else config.min_lr_ratio * config.lr


def find_evaluation_interval(training: TrainingConfig) -> int | None:
    """Steps between evaluations; None without evaluation."""
    return training.eval_interval if training.eval_iters else None


def compute_learning_rate(step: int, config: OptimizerConfig, train_iters: int) -> float:
    """The rate of optimizer step `step`, counted from 1; the definitions of Megatron-LM optimizer_param_scheduler.py.

    Linear warm-up from 0, then the decay to `find_final_learning_rate`, which is reached at `find_decay_end` and stays.
    """
    end, final = find_decay_end(config, train_iters), find_final_learning_rate(config)
    warmup = warmup_steps(config, train_iters)
    if step <= warmup and warmup > 0:
        return config.lr * step / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if step >= end:
        return final
    return final + _compute_remaining_share(step, config, train_iters) * (config.lr - final)


def _compute_remaining_share(step: int, config: OptimizerConfig, train_iters: int) -> float:
    """Share of the way from the final rate to `lr` that is left at `step`, between warm-up and the end of the decay."""
    end, warmup = find_decay_end(config, train_iters), warmup_steps(config, train_iters)
    done = (step - warmup) / (end - warmup)
    if config.lr_decay_style == "linear":
        return 1.0 - done
    if config.lr_decay_style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    decay = count_wsd_decay_steps(config, train_iters)
    return min(1.0, (end - step) / decay) if decay else 1.0

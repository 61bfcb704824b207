"""Megatron's own schedule of learning rate and weight decay (`schedule: engine`)."""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from primus.config.schedule import find_final_learning_rate
from primus.config.schema import Trainer


def build_scheduler(trainer: Trainer, optimizer: Any, global_batch_size: int) -> OptimizerParamScheduler:
    """The scheduler that Megatron-LM builds for a training of steps; it counts samples.

    Source: megatron/training/training.py, `get_optimizer_param_scheduler`.
    """
    config, steps = trainer.optimizer, trainer.training.train_iters
    end = config.lr_decay_iters or steps
    decay = max(1, end // 5) if config.lr_wsd_decay_iters is None else config.lr_wsd_decay_iters
    warmup: float = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * end
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=find_final_learning_rate(config),
        lr_warmup_steps=warmup * global_batch_size,
        lr_decay_steps=end * global_batch_size,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps * global_batch_size,
        wd_incr_style="constant",
        wsd_decay_steps=decay * global_batch_size,
        lr_wsd_decay_style="linear",
    )

"""AdamW with its two parameter groups, with and without weight decay, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from primus.config.schedule import decay_end, final_learning_rate, warmup_steps
from primus.config.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) in its fused form; matrices decay, norms and biases do not.

    Build it after `step.prepare_model`, which replaces the parameters of a sharded model.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def compute_learning_rate(step: int, config: OptimizerConfig, train_iters: int) -> float:
    """The rate of optimizer step `step`, counted from 1; the definitions of Megatron-LM optimizer_param_scheduler.py.

    Linear warm-up from 0, then the decay to `min_lr`, which ends at `lr_decay_iters` and stays there.
    """
    end, final = decay_end(config, train_iters), final_learning_rate(config)
    warmup = warmup_steps(config, train_iters)
    if step <= warmup and warmup > 0:
        return config.lr * step / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if step >= end:
        return final
    return final + _compute_remaining_share(step, warmup, end, config) * (config.lr - final)


def _compute_remaining_share(step: int, warmup: int, end: int, config: OptimizerConfig) -> float:
    """Share of the way from the final rate to `lr` that is left at `step`, between warm-up and the end of the decay."""
    done = (step - warmup) / (end - warmup)
    if config.lr_decay_style == "linear":
        return 1.0 - done
    if config.lr_decay_style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    decay = (end - warmup) // 5 if config.lr_wsd_decay_iters is None else config.lr_wsd_decay_iters
    return min(1.0, (end - step) / decay) if decay else 1.0

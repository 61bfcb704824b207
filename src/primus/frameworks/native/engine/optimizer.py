"""AdamW with its two parameter groups, with and without weight decay."""

from __future__ import annotations

import torch
from torch import nn

from primus.config.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) in its fused form; matrices decay, norms and biases do not.

    Build it after `step.prepare_model`, which replaces the parameters of a sharded model.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Biases of experts are stacked to matrices.
            (others if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )

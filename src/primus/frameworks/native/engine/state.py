"""The tensors of a model and its optimizer that a checkpoint holds, by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from primus.frameworks.native.engine.moe import iterate_balance_biases

WEIGHT = "model."
"""Prefix of a weight's name."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Moments of AdamW, of a weight's shape."""
STEPS = "optimizer.step"
"""Updates that the optimizer has applied: the same for every weight, and fewer than steps if some were skipped."""


def collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Trained weights and biases of routers by name, each once, in place: what is copied into them is in the model."""
    named = chain(_iterate_trained(model), iterate_balance_biases(model))
    return {WEIGHT + name: weight.detach() for name, weight in named}


def collect_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments and step count by name; moments in place, zero before the first step."""
    named: dict[str, Tensor] = {}
    for name, weight in _iterate_trained(model):
        state = _state_of(weight, optimizer)
        named |= {f"optimizer.{moment}.{name}": state[moment] for moment in MOMENTS}
        named[STEPS] = state["step"].cpu()
    return named


def set_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Tensor) -> None:
    """Set the step count of every weight."""
    for _, weight in _iterate_trained(model):
        _state_of(weight, optimizer)["step"].copy_(steps)


def _iterate_trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)


def _state_of(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of AdamW for one weight, created as its first step does (torch/optim/adamw.py, `_init_group`)."""
    state = optimizer.state[weight]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state

"""The initial value of a weight by seed and name, the same on every engine, device and number of processes."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from primus.config.schema import ModelSpec

RESIDUAL_OUTPUTS = (
    *("attention.output.weight", "feed_forward.down.weight", "shared.down.weight", "experts.down"),
    *("o_proj.weight", "down_proj.weight", "down_proj", ".w2.weight"),
)
"""Ends of names, in native and in the hub, of the matrices that write to the residual stream."""

STACK_DIMENSIONS = 3
"""Of a tensor that has the matrices of all experts."""


def draw_initial_value(name: str, shape: tuple[int, ...], spec: ModelSpec, seed: int) -> Tensor:
    """The whole initial value of a weight, by its name in native or in the hub, float32 on the CPU.

    Matrices are normal with `init_method_std`; those that write to the residual stream are divided by
    sqrt(2 x layers), as Megatron-LM's `scaled_init_method_normal`. Norms (and sinks) are one, biases zero. Each expert
    of a stack is drawn by its own name, `name[expert]`.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == STACK_DIMENSIONS:
        return torch.stack(
            [draw_initial_value(f"{name}[{expert}]", shape[1:], spec, seed) for expert in range(shape[0])]
        )
    if len(shape) == 1:
        return torch.ones(shape)
    std = spec.init_method_std
    if name.partition("[")[0].endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * spec.num_layers)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # it keeps 32 bits
    return torch.empty(shape).normal_(0.0, std, generator=generator)

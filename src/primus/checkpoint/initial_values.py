"""The initial value of a weight by seed and name, the same on every engine, device and number of processes."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from primus.config.schema import ModelSpec

RESIDUAL_OUTPUTS = (
    *("attention.output.weight", "feed_forward.down.weight"),
    *("o_proj.weight", "down_proj.weight", "down_proj", ".w2.weight"),
)
"""Ends of names, in native and in the hub, of the matrices that write to the residual stream."""


def draw_initial_value(name: str, shape: tuple[int, ...], spec: ModelSpec, seed: int) -> Tensor:
    """The whole initial value of a weight, by its name in native or in the hub, float32 on the CPU.

    Matrices are normal with `init_method_std`; those that write to the residual stream are divided by
    sqrt(2 x layers), as Megatron-LM's `scaled_init_method_normal`. Norms (and sinks) are one, biases zero.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = spec.init_method_std
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * spec.num_layers)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # it keeps 32 bits
    return torch.empty(shape).normal_(0.0, std, generator=generator)

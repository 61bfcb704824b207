"""The initial value of a weight by seed and name, the same on every engine, device and number of processes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence

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


MOST_ELEMENTS = 1 << 26
"""Elements that are drawn at once: 256 MiB, so that a process needs memory for its own part of a matrix only."""


def draw_initial_value(name: str, shape: Sequence[int], spec: ModelSpec, seed: int) -> Tensor:
    """The whole initial value of a weight, by its name in native or in the hub, float32 on the CPU.

    Matrices are normal with `init_method_std`; those that write to the residual stream are divided by
    sqrt(2 x layers), as Megatron-LM's `scaled_init_method_normal`. Norms (and sinks) are one, biases zero. Each expert
    of a stack is drawn by its own name, `name[expert]`.
    """
    return torch.cat([rows for _, rows in draw_initial_rows(name, shape, spec, seed)])


def draw_initial_rows(name: str, shape: Sequence[int], spec: ModelSpec, seed: int) -> Iterator[tuple[int, Tensor]]:
    """The value of `draw_initial_value` in parts: the first row of each, and its rows."""
    if name.endswith("bias"):
        yield 0, torch.zeros(*shape)
        return
    if len(shape) == STACK_DIMENSIONS:
        for expert in range(shape[0]):
            yield expert, draw_initial_value(f"{name}[{expert}]", shape[1:], spec, seed).unsqueeze(0)
        return
    if len(shape) == 1:
        yield 0, torch.ones(*shape)
        return
    std = spec.init_method_std
    if name.partition("[")[0].endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * spec.num_layers)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # it keeps 32 bits
    # PyTorch draws 16 values at a time, and the last ones again if fewer are left: parts of whole sixteens, none of
    # them short, have the values of the whole (aten/src/ATen/native/cpu/DistributionTemplates.h, normal_fill).
    size = max(16, MOST_ELEMENTS // math.prod(shape[1:]) // 16 * 16)
    begin = 0
    while begin < shape[0]:
        count = size if shape[0] - begin >= 2 * size else shape[0] - begin
        yield begin, torch.empty(count, *shape[1:]).normal_(0.0, std, generator=generator)
        begin += count

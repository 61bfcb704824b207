"""The initial value of a weight by seed and name, the same on every engine, device and number of processes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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


MOST_ELEMENTS = 1 << 24
"""Elements that are drawn at once: 64 MiB, so that a process needs memory for its own part of a matrix only."""


class InitialMatrix(NamedTuple):
    """Values that are drawn by one name: those of a weight, or of one expert of a stack."""

    name: str
    """In native or in the hub; `name[expert]` of an expert."""
    shape: tuple[int, ...]
    expert: int | None = None

    @property
    def is_constant(self) -> bool:
        """Whether nothing is drawn."""
        return len(self.shape) == 1 or self.name.endswith("bias")

    def split_rows(self) -> list[tuple[int, int]]:
        """The first row and the number of rows of each part that is drawn at once; an expert is drawn whole.

        PyTorch draws 16 values at a time, and the last ones again if fewer are left: parts of whole sixteens, none of
        them short, have the values of the whole (aten/src/ATen/native/cpu/DistributionTemplates.h, normal_fill).
        """
        count, size = self.shape[0], max(16, MOST_ELEMENTS // math.prod(self.shape[1:]) // 16 * 16)
        begins = range(0, max(1, count // size) * size if self.expert is None else 1, size)
        return [(begin, (count if begin == begins[-1] else begin + size) - begin) for begin in begins]


def split_initial_value(name: str, shape: Sequence[int]) -> list[InitialMatrix]:
    """What a weight consists of."""
    if len(shape) == STACK_DIMENSIONS:
        return [InitialMatrix(f"{name}[{expert}]", tuple(shape[1:]), expert) for expert in range(shape[0])]
    return [InitialMatrix(name, tuple(shape))]


def draw_initial_value(name: str, shape: Sequence[int], spec: ModelSpec, seed: int) -> Tensor:
    """The whole initial value of a weight, by its name in native or in the hub, float32 on the CPU.

    Matrices are normal with `init_method_std`; those that write to the residual stream are divided by
    sqrt(2 x layers), as Megatron-LM's `scaled_init_method_normal`. Norms (and sinks) are one (zero if they are centered
    there), biases zero. Each expert
    of a stack is drawn by its own name, `name[expert]`.
    """
    drawn = [torch.cat(list(draw_parts(each, spec, seed))) for each in split_initial_value(name, shape)]
    return torch.stack(drawn) if len(shape) == STACK_DIMENSIONS else drawn[0]


def draw_parts(matrix: InitialMatrix, spec: ModelSpec, seed: int) -> Iterator[Tensor]:
    """The rows of `matrix.split_rows()`, one part after the other."""
    if matrix.is_constant:
        is_zero = spec.zero_centered_norms or matrix.name.endswith("bias")
        yield torch.full(matrix.shape, 0.0 if is_zero else 1.0)
        return
    std = spec.init_method_std
    if matrix.name.partition("[")[0].endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * spec.num_layers)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {matrix.name}".encode()))  # it keeps 32 bits
    for _, count in matrix.split_rows():
        yield torch.empty(count, *matrix.shape[1:]).normal_(0.0, std, generator=generator)

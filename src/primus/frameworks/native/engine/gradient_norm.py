"""The norm of a gradient that is spread over parameters and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from primus.frameworks.native.engine.layout import ALONE, Axis
from primus.frameworks.native.engine.ops import choose_wide_dtype, is_on_cpu
from primus.frameworks.native.engine.placement import PlacedWeight

MAX_ROW_ELEMENTS = 2**10
"""Elements whose norm is float32. PyTorch gives whole rows to its threads, so that their number changes no bit; a sum
of 2^15 elements or more to one value is cut at the number of threads (at::internal::GRAIN_SIZE,
aten/src/ATen/native/TensorIteratorReduce.cpp)."""
CHUNK_ROWS = 2**14
"""Rows that are added up at once: below the limit above."""
SHORT_VECTOR_ELEMENTS = 2**20
"""Elements of a vector of which each is a row, so that where it is cut changes nothing."""
VECTOR_ROW_ELEMENTS = 2**8
"""Length of the rows of a longer vector. They depend on where it is cut, but then there are 4,096 or more, and what
each rounds to float32 leaves 5e-10 of their sum."""


def compute_gradient_norm(gradients: Sequence[PlacedWeight], stages: Axis = ALONE.pipeline) -> Tensor:
    """The 2-norm of all `gradients` together, the same on every process that holds a part of them.

    On CPU the norms of rows are float32 and added up in float64, because PyTorch adds a whole float32 tensor up in as
    many partial sums as a vector register has elements, which loses 1e-5 of the norm at 1 M elements and 5e-3 at 67 M
    (aten/src/ATen/native/cpu/ReduceOpsKernel.cpp, norm_kernel_cpu_impl). Processes share a tensor by whole rows, so
    that the norm does not depend on their number. Devices reduce in trees.

    Args:
        gradients: Of this process.
        stages: The processes with the gradients of other layers.
    """
    if not gradients:
        return torch.zeros(())
    # One total for each set of processes that share tensors: an all-reduce must not add up copies of one.
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(gradient.sharing_groups, []).append(gradient.local.detach())
    totals = [_sum_of_squares(shared) for shared in parts.values()]
    for groups, total in zip(parts, totals, strict=True):
        for group in groups:
            dist.all_reduce(total, group=group)
    total = torch.stack(totals).sum()
    if stages.size > 1:
        dist.all_reduce(total, group=stages.group)
    return total.sqrt()


def _sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """The sum of squares of tensors, in float64 on CPU, in float32 or wider on devices."""
    if not is_on_cpu(parts[0]):
        return torch.stack(torch._foreach_norm(list(parts))).square_().sum()
    norms = torch.cat([norms.double() for part in parts for norms in _compute_row_norms(part)])
    return torch.stack([chunk.sum() for chunk in norms.square_().split(CHUNK_ROWS)]).sum()


def _compute_row_norms(part: Tensor) -> list[Tensor]:
    """The norms of the rows of a tensor, where a row is its last dimension; those of longer rows are in pieces."""
    if part.dim() > 1:
        rows = part.reshape(-1, part.shape[-1])
        return [_compute_norms(piece) for piece in rows.split(MAX_ROW_ELEMENTS, dim=1)]
    if part.numel() < SHORT_VECTOR_ELEMENTS:
        return [part.double()]
    # What is left is shorter than a row, and thus a vector of single elements.
    rest = part.numel() % VECTOR_ROW_ELEMENTS
    rows = part[: part.numel() - rest].view(-1, VECTOR_ROW_ELEMENTS)
    return [_compute_norms(rows), *_compute_row_norms(part[part.numel() - rest :])]


def _compute_norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=choose_wide_dtype(rows.dtype))

"""The norm of a gradient that is spread over parameters and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

ROW_ELEMENTS = 2**10
"""Elements whose norm is float32: rounded to 6e-8 of it, which leaves 2e-10 of the norm of 25 M elements. PyTorch gives
whole rows to its threads, so that their number does not change a bit; a sum of 2^15 elements or more to one value is
cut at the number of threads (at::internal::GRAIN_SIZE, aten/src/ATen/native/TensorIteratorReduce.cpp)."""
CHUNK_ROWS = 2**14
"""Rows that are added up at once: below the limit above."""


def compute_gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all `gradients` together, the same on every process that holds a part of them.

    On CPU the norms of short rows are added up in float64, because PyTorch adds a whole float32 tensor up in as many
    partial sums as a vector register has elements, which loses 1e-5 of the norm at 1 M elements and 5e-3 at 67 M, so
    that the loss depends on where a tensor is cut (aten/src/ATen/native/cpu/ReduceOpsKernel.cpp,
    norm_kernel_cpu_impl). Devices reduce in trees.
    """
    if not gradients or gradients[0].device.type != "cpu":
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # One total for each set of processes that share tensors: an all-reduce must not add up copies of one.
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(_groups_of_shards(gradient), []).append(_local_part(gradient).detach().flatten())
    totals = [_sum_of_squares(shared) for shared in parts.values()]
    for groups, total in zip(parts, totals, strict=True):
        for group in groups:
            dist.all_reduce(total, group=group)
    return torch.stack(totals).sum().sqrt()


def _groups_of_shards(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of processes over which a gradient is sharded; processes that have equal copies are in none."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(index) for index, placement in enumerate(gradient.placements) if placement.is_shard())


def _local_part(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """The sum of squares of flat float32 tensors, in float64."""
    norms, tails = [], []
    for part in parts:
        num_in_rows = part.numel() // ROW_ELEMENTS * ROW_ELEMENTS
        if num_in_rows:
            norms.append(torch.linalg.vector_norm(part[:num_in_rows].view(-1, ROW_ELEMENTS), dim=1))
        if num_in_rows < part.numel():
            tails.append(part[num_in_rows:])
    if tails:
        norms.append(torch.stack(torch._foreach_norm(tails, dtype=torch.float64)))
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    squares = torch.cat([norm.double() for norm in norms]).square_()
    return torch.stack([chunk.sum() for chunk in squares.split(CHUNK_ROWS)]).sum()

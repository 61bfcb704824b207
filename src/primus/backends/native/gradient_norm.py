"""The norm of a gradient that is spread over parameters and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK_ELEMENTS = 2**14
"""Elements that are float64 at once: 128 KiB stay in a core's cache. PyTorch shares a reduction of 2^15 elements or
more out to its threads (at::internal::GRAIN_SIZE), and the sum would depend on their number in its last bits."""


def compute_gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all `gradients` together, the same on every process that holds a part of them.

    On CPU it is float64: PyTorch adds a float32 tensor up in as many partial sums as a vector register has elements,
    which loses 1e-5 of the norm at 1 M elements and 5e-3 at 67 M, so that the loss depends on where a tensor is cut
    (aten/src/ATen/native/cpu/ReduceOpsKernel.cpp, norm_kernel_cpu_impl). Devices reduce in trees.
    """
    if not gradients or gradients[0].device.type != "cpu":
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    totals: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for gradient in gradients:
        groups = _groups_of_shards(gradient)
        totals[groups] = totals.get(groups, 0.0) + _sum_of_squares(_local_part(gradient))
    for groups, total in totals.items():
        for group in groups:
            dist.all_reduce(total, group=group)
    return torch.stack(list(totals.values())).sum().sqrt()


def _groups_of_shards(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of processes over which a gradient is sharded; processes that have equal copies are in none."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(index) for index, placement in enumerate(gradient.placements) if placement.is_shard())


def _local_part(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sum_of_squares(values: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for chunk in values.detach().flatten().split(CHUNK_ELEMENTS):
        total += chunk.double().square_().sum()
    return total

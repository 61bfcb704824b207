"""Exchanges between processes with gradients. Each is the identity where a process is alone.

Shape suffixes: B batch, S sequence, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from primus.frameworks.native.engine.layout import Axis, Layout

SEQUENCE = 1
"""Dimension of the sequence in activations [B, S, D]."""

# Renamed in PyTorch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Exchange = Callable[[Tensor, Axis, int], Tensor]


def enter_tensor_region(x_BSD: Tensor, layout: Layout) -> Tensor:
    """The whole sequence of this process's data and context, for matrices that are divided by columns."""
    if layout.sequence_parallel:
        return gather(x_BSD, layout.tensor, SEQUENCE)
    return _exchange(x_BSD, layout.tensor, SEQUENCE, _keep, _sum)


def leave_tensor_region(x_BSD: Tensor, layout: Layout) -> Tensor:
    """The sum of what the matrices that are divided by rows have added to, or this process's part of the sequence."""
    if layout.sequence_parallel:
        return _exchange(x_BSD, layout.tensor, SEQUENCE, _scatter_sum, _concatenate)
    return _exchange(x_BSD, layout.tensor, SEQUENCE, _sum, _keep)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The parts of all processes along `dim`; each process adds to their gradients."""
    return _exchange(x, axis, dim, _concatenate, _scatter_sum)


def take_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The part of this process of what all have alike."""
    return _exchange(x, axis, dim, _take_part, _concatenate)


def join_parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The reverse of `take_part`: all processes then do the same with the whole."""
    return _exchange(x, axis, dim, _concatenate, _take_part)


def add_up(x: Tensor, axis: Axis) -> Tensor:
    """The sum of what the processes have, each of which keeps the gradient of its own part."""
    return _exchange(x, axis, 0, _sum, _keep)


def gather_context(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The whole sequence in its order, from the parts of `take_context`; each process adds to their gradients."""
    if axis.size == 1:
        return x
    chunks = gather(x, axis, dim).chunk(2 * axis.size, dim)
    return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)


def take_context(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The part of a sequence that a process computes: one chunk from each end, so that causal attention is even."""
    if axis.size == 1:
        return x
    chunks = x.chunk(2 * axis.size, dim)
    return torch.cat([chunks[axis.rank], chunks[-1 - axis.rank]], dim)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """Rows from all processes: `sent[i]` rows of this one go to process i, and `received[i]` come from it."""
    return x if axis.size == 1 else _RowExchange.apply(x, sent, received, axis)


def _exchange(x: Tensor, axis: Axis, dim: int, forward: Exchange, backward: Exchange) -> Tensor:
    return x if axis.size == 1 else _Exchange.apply(x, axis, dim, forward, backward)


class _Exchange(torch.autograd.Function):
    """An exchange, and the one that its gradient makes."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.axis, ctx.dim, ctx.derivative = axis, dim, backward
        return forward(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.derivative(grad, ctx.axis, ctx.dim), None, None, None, None


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _exchange_rows(x, sent, received, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _exchange_rows(grad, ctx.received, ctx.sent, ctx.axis), None, None, None


def _exchange_rows(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    found = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=axis.group)
    return found


def _keep(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.view_as(x)


def _take_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def _sum(x: Tensor, axis: Axis, dim: int) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _concatenate(x: Tensor, axis: Axis, dim: int) -> Tensor:
    parts = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts.chunk(axis.size), dim)


def _scatter_sum(x: Tensor, axis: Axis, dim: int) -> Tensor:
    parts = torch.cat(x.chunk(axis.size, dim))
    part = parts.new_empty((parts.shape[0] // axis.size, *parts.shape[1:]))
    _reduce_scatter(part, parts, group=axis.group)
    return part

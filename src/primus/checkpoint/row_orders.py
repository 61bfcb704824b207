"""Orders in which the rows of hub tensors stand in the tensors of an engine.

An order is a function from the rows of hub tensors to the rows of one engine tensor. `index_rows` applies it to row
numbers, so that the opposite direction, and the rows that a slice needs, follow from the one function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class HeadSizes(NamedTuple):
    """What the order of attention rows depends on."""

    head_dim: int
    num_query_groups: int


class RowIndex(NamedTuple):
    """Where each row of a tensor comes from."""

    parts_R: Tensor
    """Index of the tensor, int64."""
    rows_R: Tensor
    """Row in that tensor, int64."""


def keep_rows(parts: list[Tensor], _: HeadSizes) -> Tensor:
    """The rows as they are."""
    (part,) = parts
    return part


def concatenate_rows(parts: list[Tensor], _: HeadSizes) -> Tensor:
    """One tensor after the other."""
    return torch.cat(parts)


def order_by_query_group(parts: list[Tensor], sizes: HeadSizes) -> Tensor:
    """For each query group its query heads, its key, its value (Megatron-LM `linear_qkv`)."""
    return torch.cat([part.view(sizes.num_query_groups, -1) for part in parts], 1).flatten()


def order_rotary_pairs(parts: list[Tensor], sizes: HeadSizes) -> Tensor:
    """In each head the two channels that rotate together become neighbors; in the hub they are half a head apart."""
    (part,) = parts
    return part.view(-1, 2, sizes.head_dim // 2).transpose(1, 2).flatten()


def order_rotary_pairs_by_query_group(parts: list[Tensor], sizes: HeadSizes) -> Tensor:
    """Queries and keys in rotary pairs, then for each query group its query heads, its key, its value."""
    query, key, value = parts
    return order_by_query_group([order_rotary_pairs([query], sizes), order_rotary_pairs([key], sizes), value], sizes)


def split_neighbors(parts: list[Tensor], _: HeadSizes) -> Tensor:
    """Even rows, then odd rows: the gates of gpt-oss, then what they gate."""
    (part,) = parts
    return torch.cat([part[0::2], part[1::2]])


ROW_ORDERS: dict[str, Callable[[list[Tensor], HeadSizes], Tensor]] = {
    "keep": keep_rows,
    "concatenate": concatenate_rows,
    "by_query_group": order_by_query_group,
    "rotary_pairs": order_rotary_pairs,
    "rotary_pairs_by_query_group": order_rotary_pairs_by_query_group,
    "split_neighbors": split_neighbors,
}
"""Orders by the name that they have in `families/`."""


class OrderIndex(NamedTuple):
    """An order in both directions."""

    engine: RowIndex
    """Where the rows of the engine tensor come from."""
    hub: list[Tensor]
    """For each hub tensor: the rows of the engine tensor that its rows are, int64."""


class RowRun(NamedTuple):
    """Rows that follow each other in a hub tensor and in the engine tensor."""

    part: int
    """Index of the hub tensor."""
    first: int
    """First row there."""
    num_rows: int


def find_runs(parts_R: Tensor, rows_R: Tensor) -> list[RowRun]:
    """The rows of a `RowIndex`, or of a slice of one, in runs as long as possible."""
    if not len(rows_R):
        return []
    is_break_R = (parts_R[1:] != parts_R[:-1]) | (rows_R[1:] != rows_R[:-1] + 1)
    firsts = [0, *(is_break_R.nonzero().flatten() + 1).tolist()]
    ends = [*firsts[1:], len(rows_R)]
    places = zip(parts_R[firsts].tolist(), rows_R[firsts].tolist(), firsts, ends, strict=True)
    return [RowRun(part, row, end - first) for part, row, first, end in places]


@lru_cache(maxsize=256)
def index_rows(order: str, num_rows: tuple[int, ...], sizes: HeadSizes) -> OrderIndex:
    """An order, a name of `ROW_ORDERS`, applied to hub tensors of `num_rows` rows each."""
    numbers = torch.arange(sum(num_rows))
    parts = list(numbers.split(num_rows))
    engine_R = ROW_ORDERS[order](parts, sizes).contiguous()
    inverse_R = torch.empty_like(numbers)
    inverse_R[engine_R] = numbers
    ends = torch.tensor(num_rows).cumsum(0)
    parts_R = torch.searchsorted(ends, engine_R, right=True)
    starts = ends - torch.tensor(num_rows)
    return OrderIndex(RowIndex(parts_R, engine_R - starts[parts_R]), list(inverse_R.split(num_rows)))

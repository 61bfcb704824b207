"""Which part of each weight a process holds, as the weights of a layout, of checkpoints and of initial values need it.

A weight is divided over the processes of `layout.tensor` (or its experts over those of `layout.expert`), and what is
left of it is sharded by FSDP2. The pieces of both together are slices of the whole weight, in its order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from primus.config.schema import ModelSpec
from primus.frameworks.native.engine.layout import Axis, Layout
from primus.models.counts import head_dim, num_query_groups, value_head_dim

EXPERT_STACKS = ("experts.gate_up", "experts.down", "experts.gate_up_bias", "experts.down_bias")
"""Ends of the names of weights that have one matrix or vector for each expert."""
OWN_GRADIENTS = (
    *("query_norm.weight", "key_norm.weight", "query_down.weight", "latent.weight", "latent_norm.weight"),
    *("router.weight", "router.bias"),
)
"""Ends of names of whole weights that see the heads or the tokens of one tensor-parallel process only; with
`sequence_parallel` every whole weight sees a part of the sequence."""


def share(size: int, axis: Axis) -> int:
    """How many of `size` things a process of `axis` holds; the first ones hold one more where it does not divide."""
    return size // axis.size + (axis.rank < size % axis.size)


def find_begin(size: int, axis: Axis) -> int:
    """How many of `size` things the processes before hold."""
    return size // axis.size * axis.rank + min(axis.rank, size % axis.size)


class Division(NamedTuple):
    """How a weight is divided over processes before it is sharded."""

    axis: Axis = Axis()
    """The processes."""
    dim: int = 0
    """Dimension that is divided."""
    blocks: tuple[int, ...] = ()
    """Sizes along it that are divided each for itself, such as those of queries, keys and values."""
    is_partial: bool = False
    """Whether each process of `layout.tensor` has a part of the gradient of a weight that is not divided."""


def find_division(name: str, spec: ModelSpec, layout: Layout) -> Division:
    """The division of a weight by its name in native."""
    heads, groups, width = spec.num_attention_heads, num_query_groups(spec), head_dim(spec)
    queries, keys, values = heads * width, groups * width, heads * value_head_dim(spec)
    if name.endswith(EXPERT_STACKS):
        assert spec.num_experts is not None
        return Division(layout.expert, 0, (spec.num_experts,))
    shared_width = spec.moe_shared_expert_intermediate_size or 0
    for ending, dim, blocks in (
        ("embedding.weight", 0, (spec.vocab_size,)),
        ("attention.qkv.weight", 0, (queries, keys, keys)),
        ("attention.qkv.bias", 0, (queries, keys, keys)),
        ("attention.sinks", 0, (heads,)),
        ("attention.query.weight", 0, (queries,)),
        ("attention.query_up.weight", 0, (queries,)),
        ("attention.key_value.weight", 0, (heads * (spec.qk_head_dim or 0) + values,)),
        ("attention.output.weight", 1, (values,)),
        ("feed_forward.gate_up.weight", 0, (spec.ffn_hidden_size,) * 2),
        ("feed_forward.down.weight", 1, (spec.ffn_hidden_size,)),
        ("shared.gate_up.weight", 0, (shared_width,) * 2),
        ("shared.down.weight", 1, (shared_width,)),
    ):
        if name.endswith(ending):
            return Division(layout.tensor, dim, blocks)
    if name == "output.weight":
        return Division(layout.tensor, 0, (spec.vocab_size,))
    return Division(is_partial=layout.tensor.size > 1 and (layout.sequence_parallel or name.endswith(OWN_GRADIENTS)))


class WeightPiece(NamedTuple):
    """A part of a weight that is contiguous in the whole."""

    local: Tensor
    """The part, in place."""
    offsets: tuple[int, ...]
    """Where it begins in the whole weight."""


@dataclass(frozen=True)
class PlacedWeight:
    """A tensor of a weight's shape, of which a process holds pieces; torch.distributed.checkpoint saves and loads it.

    Args:
        tensor: The part of this process; a DTensor if it is sharded.
        division: How the whole is divided.
        part: The part of another tensor of the same shape, if it is no DTensor.
    """

    tensor: Tensor
    division: Division = field(default_factory=Division)
    part: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        sizes = list(self.tensor.shape)
        if self.division.axis.size > 1:
            sizes[self.division.dim] = sum(self.division.blocks)
        return torch.Size(sizes)

    @property
    def local(self) -> Tensor:
        if self.part is not None:
            return self.part
        return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor

    @property
    def sharing_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of processes that hold different parts; those that have equal copies are in none."""
        axis = self.division.axis
        groups = [axis.group] if axis.group is not None and axis.size > 1 else []
        if isinstance(self.tensor, DTensor):
            mesh = self.tensor.device_mesh
            groups += [mesh.get_group(dim) for dim, each in enumerate(self.tensor.placements) if each.is_shard()]
        return tuple(groups)

    def place(self, tensor: Tensor) -> PlacedWeight:
        """Another tensor of the same weight, such as its gradient; or the part of this process of it."""
        if isinstance(self.tensor, DTensor) and not isinstance(tensor, DTensor):
            return PlacedWeight(self.tensor, self.division, tensor)
        return PlacedWeight(tensor, self.division)

    @torch.no_grad()
    def fill(self, rows: Tensor, begin: int = 0) -> None:
        """Copy what this process has of `rows` of the whole weight, the first of which is `begin`."""
        for local, offsets in self.list_pieces():
            low, high = max(begin, offsets[0]), min(begin + len(rows), offsets[0] + len(local))
            if low < high:
                index = [slice(first, first + size) for first, size in zip(offsets, local.shape, strict=True)]
                index[0] = slice(low - begin, high - begin)
                local[low - offsets[0] : high - offsets[0]].copy_(rows[tuple(index)])

    def list_pieces(self) -> list[WeightPiece]:
        """The pieces of this process."""
        local = self.local
        begins = [0] * local.dim()
        if isinstance(self.tensor, DTensor):
            _, offsets = compute_local_shape_and_global_offset(
                self.tensor.shape, self.tensor.device_mesh, self.tensor.placements
            )
            begins = list(offsets)
        if self.division.axis.size == 1:
            return [WeightPiece(local, tuple(begins))] if local.numel() else []
        return list(self._cut_blocks(local, begins))

    def _cut_blocks(self, local: Tensor, begins: Sequence[int]) -> Iterator[WeightPiece]:
        """The part of each block that FSDP2 has left to this process."""
        axis, dim = self.division.axis, self.division.dim
        own_begin = whole_begin = 0
        for size in self.division.blocks:
            first, num_own = find_begin(size, axis), share(size, axis)
            low = max(own_begin, begins[dim])
            high = min(own_begin + num_own, begins[dim] + local.shape[dim])
            if low < high and local.numel():
                offsets = list(begins)
                offsets[dim] = whole_begin + first + low - own_begin
                yield WeightPiece(local.narrow(dim, low - begins[dim], high - low), tuple(offsets))
            own_begin, whole_begin = own_begin + num_own, whole_begin + size

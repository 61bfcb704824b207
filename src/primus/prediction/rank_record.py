"""What one rank of a training does in a step, as executed on fake tensors: memory, exchanges, operations."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Phase = Literal["setup", "forward", "backward", "clip", "optimizer", "save"]
"""Part of a step. `clip` is the norm of the gradient and all else between the last pass and the optimizer."""
Kind = Literal["only", "first", "middle", "last"]
"""Which layers a rank has: all, or those of a pipeline stage."""


class MemoryParts(Struct, frozen=True, kw_only=True):
    """Bytes on a device, by what they are for."""

    weights: int = 0
    """Weights as they are kept between steps, with buffers."""
    gathered: int = 0
    """Sharded weights and their gradients that are whole for the moment (FSDP2)."""
    gradients: int = 0
    """Gradients as the optimizer reads them."""
    optimizer: int = 0
    """State of the optimizer."""
    activations: int = 0
    """All other tensors: what the backward pass needs, and what operators compute with."""
    communication: int = 0
    """Buffers that are sent or received."""

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__struct_fields__)


class MemoryMoment(Struct, frozen=True, kw_only=True):
    """Memory at a moment of the step."""

    operator: int
    """Operators that ran before."""
    phase: Phase
    micro_batch: int
    """Micro batches whose forward pass has begun."""
    parts: MemoryParts


class PassMark(Struct, frozen=True, kw_only=True):
    """Where a pass of a micro batch begins."""

    operator: int
    """Operators that ran before."""
    phase: Phase


class Exchange(Struct, frozen=True, kw_only=True):
    """Collectives, or messages between two ranks, that are alike: of one operation and group, in one phase."""

    operation: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``send``, ``receive``."""
    group: str
    """What its ranks share: ``tensor``, ``context``, ``expert``, ``pipeline``, ``shard``, ``replicate``, ..."""
    size: int
    """Ranks of the group."""
    num_nodes: int
    """Nodes of the group; more than 1 if it crosses nodes."""
    ranks_per_node: int
    """Ranks of the group on the node of this rank."""
    phase: Phase
    count: int
    """How often in a step."""
    total_bytes: int
    """Bytes of all of them together in a step; of each, the larger of what a rank gives and gets."""

    @property
    def crosses_nodes(self) -> bool:
        return self.num_nodes > 1


class Work(Struct, frozen=True, kw_only=True):
    """Operators of one kind and phase in a step."""

    kind: str
    """``product``, ``grouped_product``, ``attention``, or ``other``: those that only move and combine elements."""
    phase: Phase
    count: int
    flops: int
    """Multiplications and additions; 0 for other operators. Products that are recomputed count again."""
    moved_bytes: int
    """Bytes of the tensors that they read and write."""


class RankRecord(Struct, frozen=True, kw_only=True):
    """A step of one rank."""

    framework: str
    rank: int
    kind: Kind
    stage: int
    """Pipeline stage."""
    num_stages: int
    layers: tuple[int, ...]
    """Numbers of its layers."""
    world_size: int
    devices_per_node: int
    micro_batches: int
    """In a step."""
    executed_micro_batches: int
    """Those that were executed; the counts of a step are extended by what the last of them adds, and memory does not
    change with more."""
    in_flight: int
    """Most micro batches whose backward pass was still to come."""
    schedule: str
    """Order of the passes: ``1F1B``, ``GPipe``, ``Interleaved1F1B``, ``LoopedBFS``; ``none`` without stages."""
    bubble: float
    """Share of the step in which a stage waits for others if all stages take as long."""
    peak: MemoryMoment
    kept: MemoryParts
    """Between steps."""
    timeline: tuple[MemoryMoment, ...]
    """Memory over the step, at its extremes."""
    passes: tuple[PassMark, ...]
    """Forward and backward passes in their order, and the end of the last one."""
    exchanges: tuple[Exchange, ...]
    work: tuple[Work, ...]
    saved_bytes: int
    """Bytes that this rank writes into a checkpoint; 0 if it was not executed."""
    assumptions: tuple[str, ...]
    """What is not exactly the run."""
    seconds: float
    """Time that this took."""
    process_bytes: int
    """Peak memory of the process in which it was executed."""

    @property
    def num_operators(self) -> int:
        return sum(each.count for each in self.work)

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.work)

"""What the ranks of a training exchange in a step, by the groups of its layout.

Ranks count up tensor-parallel first, then context, data and pipeline, as Megatron-LM's default order
(`tp-cp-ep-dp-pp`, megatron/core/parallel_state.py) and torchtitan's mesh have it; an expert group takes consecutive
data-parallel ranks. The bytes are those of the algorithms, without what overlaps or what compression saves: they
compare groups with each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from primus.config.schema import Trainer
from primus.machine.placement.rank_groups import RankGroups
from primus.models.counts import count_parameters, num_moe_layers
from primus.models.layers import head_dim, num_query_groups


class GroupSizes(Struct, frozen=True, kw_only=True):
    """Sizes of the groups of a training."""

    tensor: int
    context: int
    pipeline: int
    expert: int
    data: int
    """Replicas of the model."""

    @property
    def expert_stride(self) -> int:
        """Distance of the ranks of an expert group, which takes data-parallel ranks, and tensor-parallel ones where
        those are too few."""
        return self.tensor if (self.data * self.context) % self.expert == 0 else 1

    @property
    def num_expert_copies(self) -> int:
        """Ranks that hold the same experts."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_stride)


def list_rank_groups(trainer: Trainer, world_size: int) -> tuple[RankGroups, ...]:
    """The groups of a training on `world_size` ranks with more than one member, each with its bytes in a step.

    Experts that cannot be divided over the ranks as the layout says, which an engine refuses, are left out.
    """
    parallel = trainer.parallel
    tensor, context, pipeline = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    expert = parallel.expert_model_parallel_size
    layout = GroupSizes(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=1 if (world_size // pipeline) % expert else expert,
        data=world_size // (tensor * context * pipeline),
    )
    groups = (*_list_activation_groups(trainer, layout), *_list_weight_groups(trainer, layout))
    return tuple(each for each in groups if each.size > 1)


def _list_activation_groups(trainer: Trainer, layout: GroupSizes) -> Iterator[RankGroups]:
    """Groups that exchange activations and their gradients."""
    spec, training, tp, cp, ep = trainer.model, trainer.training, layout.tensor, layout.context, layout.expert
    tokens = (training.global_batch_size or training.micro_batch_size * layout.data) / layout.data
    tokens *= training.seq_length / cp
    hidden = tokens * spec.hidden_size * _element_bytes(trainer)
    layers = spec.num_layers / layout.pipeline
    # Two reductions in the forward pass of a layer, two in its backward pass (arXiv:1909.08053, section 3); each sends
    # its share over a link twice.
    reductions = layers * 4 * 2 * _share_of_ring(tp) * hidden
    yield RankGroups(name="tensor-parallel group", size=tp, stride=1, pattern="ring", link_bytes=reductions)
    # Keys and values travel around the ring, in the backward pass with their gradients (arXiv:2310.01889).
    keys_and_values = tokens * 2 * num_query_groups(spec) * head_dim(spec) * _element_bytes(trainer) / tp
    rounds = layers * 3 * (cp - 1) * keys_and_values
    yield RankGroups(name="context-parallel group", size=cp, stride=tp, pattern="ring", link_bytes=rounds)
    # Tokens go to their experts and come back, in both passes; each pair sends in both directions.
    routed = num_moe_layers(spec) / layout.pipeline * 4 * 2 * spec.moe_router_topk * hidden / (tp * ep)
    yield RankGroups(name="expert group", size=ep, stride=layout.expert_stride, pattern="all-to-all", link_bytes=routed)
    # Activations forward, their gradients backward.
    passed = 2 * hidden / (tp if trainer.parallel.sequence_parallel else 1)
    yield RankGroups(
        name="pipeline", size=layout.pipeline, stride=tp * cp * layout.data, pattern="chain", link_bytes=passed
    )


def _list_weight_groups(trainer: Trainer, layout: GroupSizes) -> Iterator[RankGroups]:
    """Groups that hold the same weights: they reduce gradients, and gather weights that are sharded."""
    count, width = count_parameters(trainer.model), _element_bytes(trainer)
    shards = layout.tensor * layout.pipeline
    # Two passes make a reduction; sharded weights are gathered for the backward pass once more (FSDP,
    # arXiv:2304.11277, section 3.2).
    num_passes = 3 if trainer.parallel.use_distributed_optimizer else 2
    size, copies = layout.data * layout.context, layout.num_expert_copies
    dense = (count.total_parameters - count.experts) * width / shards
    yield RankGroups(
        name="data-parallel group",
        size=size,
        stride=layout.tensor,
        pattern="ring",
        link_bytes=num_passes * _share_of_ring(size) * dense,
    )
    yield RankGroups(
        name="expert data-parallel group",
        size=copies if count.experts else 1,
        stride=layout.expert_stride * layout.expert,
        pattern="ring",
        link_bytes=num_passes * _share_of_ring(copies) * count.experts * width / (shards * layout.expert),
    )


def _element_bytes(trainer: Trainer) -> int:
    return 2 if trainer.training.bf16 else 4


def _share_of_ring(size: int) -> float:
    """What a gather or a scatter sends over each link of a ring, as a part of the whole."""
    return (size - 1) / size

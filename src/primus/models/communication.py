"""What the ranks of a training exchange in a step, by the groups of its layout.

Ranks count up tensor-parallel first, then context, data and pipeline, as Megatron-LM's default order
(`tp-cp-ep-dp-pp`, megatron/core/parallel_state.py) and torchtitan's mesh have it; an expert group takes consecutive
data-parallel ranks. The bytes are those of the algorithms, without what overlaps or what compression saves: they
compare groups with each other.
"""

from __future__ import annotations

from primus.config.schema import Trainer
from primus.machine.placement.rank_groups import RankGroups
from primus.models.counts import count_parameters, num_moe_layers
from primus.models.layers import head_dim, num_query_groups


def list_rank_groups(trainer: Trainer, world_size: int) -> tuple[RankGroups, ...]:
    """The groups of a training on `world_size` ranks with more than one member, each with its bytes in a step."""
    spec, layout, training = trainer.model, trainer.parallel, trainer.training
    tp, cp, pp = (
        layout.tensor_model_parallel_size,
        layout.context_parallel_size,
        layout.pipeline_model_parallel_size,
    )
    ep = layout.expert_model_parallel_size
    dp = world_size // (tp * cp * pp)
    num_micro_batches = (training.global_batch_size or training.micro_batch_size * dp) / (
        training.micro_batch_size * dp
    )
    width = 2 if training.bf16 else 4
    tokens = num_micro_batches * training.micro_batch_size * training.seq_length / cp
    hidden = tokens * spec.hidden_size * width  # bytes of one activation of all micro batches
    keys_and_values = tokens * 2 * num_query_groups(spec) * head_dim(spec) * width / tp
    parameters = count_parameters(spec)
    dense = (parameters.total_parameters - parameters.experts) * width / (tp * pp)
    experts = parameters.experts * width / (tp * pp * ep)
    # A ring of n sends a share of (n - 1) / n over each link for a gather or a scatter: two make a reduction, and
    # sharded weights are gathered for the backward pass once more (FSDP, arXiv:2304.11277, section 3.2).
    num_passes = 3 if layout.use_distributed_optimizer else 2
    # Where the data-parallel ranks are too few, the expert group also takes the tensor-parallel ones.
    expert_stride = tp if (dp * cp) % ep == 0 else 1
    expert_copies = world_size // (pp * ep * expert_stride)
    groups = (
        # Two reductions in the forward pass of a layer, two in its backward pass (arXiv:1909.08053, section 3).
        RankGroups(
            name="tensor-parallel group",
            size=tp,
            stride=1,
            pattern="ring",
            link_bytes=spec.num_layers / pp * 4 * 2 * _share_of_ring(tp) * hidden,
        ),
        # Keys and values travel around the ring, in the backward pass with their gradients (arXiv:2310.01889).
        RankGroups(
            name="context-parallel group",
            size=cp,
            stride=tp,
            pattern="ring",
            link_bytes=spec.num_layers / pp * 3 * (cp - 1) * keys_and_values,
        ),
        # Tokens go to their experts and come back, in both passes; each pair sends in both directions.
        RankGroups(
            name="expert group",
            size=ep,
            stride=expert_stride,
            pattern="all-to-all",
            link_bytes=num_moe_layers(spec) / pp * 4 * 2 * spec.moe_router_topk * hidden / (tp * ep),
        ),
        RankGroups(
            name="data-parallel group",
            size=dp * cp,
            stride=tp,
            pattern="ring",
            link_bytes=num_passes * _share_of_ring(dp * cp) * dense,
        ),
        RankGroups(
            name="expert data-parallel group",
            size=expert_copies if experts else 1,
            stride=expert_stride * ep,
            pattern="ring",
            link_bytes=num_passes * _share_of_ring(expert_copies) * experts,
        ),
        # Activations forward, their gradients backward.
        RankGroups(
            name="pipeline",
            size=pp,
            stride=tp * cp * dp,
            pattern="chain",
            link_bytes=2 * hidden / (tp if layout.sequence_parallel else 1),
        ),
    )
    return tuple(each for each in groups if each.size > 1)


def _share_of_ring(size: int) -> float:
    return (size - 1) / size

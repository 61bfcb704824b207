"""Where a process stands among those of a run: which share a batch, a sequence, matrices, experts or layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from primus.config.schema import ParallelConfig
from primus.errors import UsageError
from primus.frameworks.native.layout_settings import LayoutSettings


@dataclass(frozen=True)
class Axis:
    """Processes that share one thing, such as a sequence."""

    size: int = 1
    """Their number."""
    rank: int = 0
    """The place of this process among them."""
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    """Their process group; None for a process alone."""


@dataclass(frozen=True)
class Layout:
    """The axes of a process. The fastest to change with the rank is `tensor`, then `context`, `data`, `pipeline`, as in
    Megatron-LM; `expert` is another division of the processes of a pipeline stage."""

    data: Axis = Axis()
    """Processes with different sequences."""
    context: Axis = Axis()
    """Processes with different parts of the same sequences."""
    tensor: Axis = Axis()
    """Processes with parts of each matrix."""
    pipeline: Axis = Axis()
    """Processes with different layers."""
    expert: Axis = Axis()
    """Processes with different experts."""
    sequence: Axis = Axis()
    """Processes with the same sequences: those of `context` and `tensor`."""
    stage: Axis = Axis()
    """Processes with the same layers."""
    sequence_parallel: bool = False
    """Whether the processes of `tensor` also divide the sequence where no matrix is divided."""
    losses: dist.ProcessGroup | None = field(default=None, repr=False)
    """The processes whose losses add up to that of the batch; None for a process alone."""
    ends: dist.ProcessGroup | None = field(default=None, repr=False)
    """The first and the last pipeline stage, which may share an embedding."""
    shard_mesh: DeviceMesh | None = field(default=None, repr=False)
    """Over which weights are sharded: one dimension, or replicas and shards; None if the weights are whole."""
    expert_mesh: DeviceMesh | None = field(default=None, repr=False)
    """The same for the weights of experts, if they are divided or each process of `tensor` routes its own tokens."""


ALONE = Layout()
"""Of a process without others."""


def build_layout(
    parallel: ParallelConfig, device: torch.device, world: int, settings: LayoutSettings | None = None
) -> Layout:
    """The layout of an experiment; every process must call it, in a process group if `world` is more than 1.

    Raises:
        UsageError: The processes with copies of a weight do not divide into as many instances as `settings` has.
    """
    if world == 1:
        return ALONE
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pipeline, expert = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    stage, is_sharded = world // pipeline, parallel.use_distributed_optimizer
    instances = settings.num_distributed_optimizer_instances if settings else 1
    ranks = torch.arange(world).view(pipeline, stage // (context * tensor), context, tensor)

    def build_mesh(order: torch.Tensor, **sizes: int) -> DeviceMesh:
        return DeviceMesh(device.type, order.reshape(*sizes.values()), mesh_dim_names=tuple(sizes))

    def build_sums(order: torch.Tensor, count: int, **others: int) -> DeviceMesh:
        """The processes whose gradients of a weight add up, which share it or have copies."""
        copies = _choose_copies(count, instances) if is_sharded else count
        mesh = build_mesh(order, **others, replicate=copies, shard=count // copies)
        return mesh["shard"] if is_sharded and copies == 1 else mesh["replicate", "shard"]

    axes = build_mesh(ranks, pipeline=pipeline, data=ranks.shape[1], context=context, tensor=tensor)
    shared = build_mesh(ranks, pipeline=pipeline, data=ranks.shape[1], sequence=context * tensor)
    stages = build_mesh(ranks, pipeline=pipeline, stage=stage)
    losses = build_mesh(ranks.permute(3, 0, 1, 2), tensor=tensor, losses=world // tensor)
    experts = build_mesh(ranks, pipeline=pipeline, copies=stage // expert, expert=expert)
    ends = None
    if pipeline > 1:
        ends, _ = dist.new_subgroups_by_enumeration(ranks.view(pipeline, -1)[[0, -1]].T.tolist())
    by_expert = ranks.view(pipeline, -1, expert).transpose(1, 2)
    return Layout(
        data=_find_axis(axes["data"]),
        context=_find_axis(axes["context"]),
        tensor=_find_axis(axes["tensor"]),
        pipeline=_find_axis(axes["pipeline"]),
        expert=_find_axis(experts["expert"]),
        sequence=_find_axis(shared["sequence"]),
        stage=_find_axis(stages["stage"]),
        sequence_parallel=parallel.sequence_parallel,
        losses=losses["losses"].get_group(),
        ends=ends,
        # Gradients of the parts of a sequence add up as those of different sequences do.
        shard_mesh=build_sums(ranks.permute(0, 3, 1, 2), stage // tensor, pipeline=pipeline, tensor=tensor),
        expert_mesh=build_sums(by_expert, stage // expert, pipeline=pipeline, expert=expert)
        if expert * tensor > 1
        else None,
    )


def _choose_copies(count: int, instances: int) -> int:
    """How many copies of a sharded weight `count` processes have."""
    if count % instances:
        problem = f"num_distributed_optimizer_instances: {instances} does not divide {count} processes with one weight"
        raise UsageError(problem, f"use a divisor of {count}")
    return instances


def _find_axis(mesh: DeviceMesh) -> Axis:
    return Axis(mesh.size(), mesh.get_local_rank(), mesh.get_group())

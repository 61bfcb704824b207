"""The device mesh of the JAX engine, and where each weight and batch lies on it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from primus.config.schema import ParallelConfig
from primus.errors import UsageError
from primus.frameworks.jax.engine.stacking import is_stacked

DATA, TENSOR = "data", "tensor"
"""Axes of the mesh."""

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Weights of which each tensor-parallel device has some output rows; of o_proj and down_proj it has input columns
(arXiv 1909.08053, section 3)."""
ROW_PARALLEL = ("o_proj", "down_proj")


class JaxLayout(NamedTuple):
    """The devices of all processes, and the part of this process."""

    mesh: Mesh
    process: int
    """Index of this process."""
    data_rank: int
    """Which micro batches this process gets."""
    data_size: int
    """Processes, or groups of processes that share each layer's matrices."""


def plan_layout(parallel: ParallelConfig, process: int = 0, num_processes: int = 1) -> JaxLayout:
    """The layout over all devices; `jax.distributed` has joined the processes.

    Raises:
        UsageError: The tensor-parallel size does not divide the devices.
    """
    mesh = build_mesh(parallel)
    # More than one if tensor parallelism spans processes: these get the same micro batches.
    together = max(1, num_processes // mesh.shape[DATA])
    return JaxLayout(mesh, process, process // together, num_processes // together)


def build_mesh(parallel: ParallelConfig) -> Mesh:
    """All devices of all processes as data-parallel groups of tensor-parallel neighbors.

    Raises:
        UsageError: The tensor-parallel size does not divide the devices.
    """
    devices, tensor = jax.devices(), parallel.tensor_model_parallel_size
    if len(devices) % tensor:
        raise UsageError(
            f"tensor_model_parallel_size: {tensor} does not divide {len(devices)} JAX devices",
            "use a divisor, or start more processes; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N"
            " in env: makes N devices of one process",
        )
    return Mesh(np.array(devices).reshape(-1, tensor), (DATA, TENSOR))


def shard_weight(name: str, shape: tuple[int, ...], mesh: Mesh, is_fully_sharded: bool) -> NamedSharding:
    """Where a weight lies: split by tensor parallelism, and its other dimension over the data-parallel devices.

    A dimension that an axis does not divide is not split, nor is that of the layers.
    """
    kind, rank = name.split(".")[-2], len(shape) - is_stacked(name)
    if kind in COLUMN_PARALLEL:
        axes: tuple[str | None, ...] = (TENSOR, DATA)[:rank]
    elif kind in ROW_PARALLEL:
        axes = (DATA, TENSOR)
    else:
        axes = (None,)
    if is_stacked(name):
        axes = (None, *axes)
    if not is_fully_sharded:
        axes = tuple(None if axis == DATA else axis for axis in axes)
    fitting = (axis if axis and size % mesh.shape[axis] == 0 else None for size, axis in zip(shape, axes, strict=True))
    return NamedSharding(mesh, PartitionSpec(*fitting))


def shard_batch(mesh: Mesh) -> NamedSharding:
    """Where micro batches [M, B, S] lie: sequences are split over the data-parallel devices."""
    return NamedSharding(mesh, PartitionSpec(None, DATA, None))


def choose_residual_sharding(mesh: Mesh, parallel: ParallelConfig) -> PartitionSpec | None:
    """Sharding of the residual stream [B, S, D]; None on one device."""
    if mesh.size == 1:
        return None
    return PartitionSpec(DATA, TENSOR if parallel.sequence_parallel else None, None)

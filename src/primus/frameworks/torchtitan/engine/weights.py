"""Weights by their Hugging Face names into the parameters of a torchtitan model, whole or sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from primus.checkpoint.renaming import EngineNames
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec
from primus.errors import PrimusError
from primus.models.counts import head_dim, num_query_groups
from primus.package_files import PROGRAM

FUSED = ".wqkv."
"""Parameters whose rows are those of three matrices in torchtitan's checkpoints (FusedQKVLinear)."""


def load_parameters(parts: Iterable[nn.Module], weights: WeightReader, spec: ModelSpec) -> None:
    """Fill the parameters of the model's parts in place; each process keeps its shards and communicates nothing.

    Raises:
        PrimusError: A tensor is missing or has another shape.
        UsageError: Weights of such a model have no names.
    """
    named = EngineNames(weights, spec, "torchtitan")
    with torch.no_grad():
        for part in parts:
            for name, parameter in _list_tensors(part):
                _fill_parameter(parameter, _read_parameter(named, name, spec))


def _list_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that are weights: the biases by which a router balances its experts."""
    yield from part.named_parameters()
    yield from ((name, buffer) for name, buffer in part.named_buffers() if name.endswith("expert_bias_E"))


def _read_parameter(named: EngineNames, name: str, spec: ModelSpec) -> Tensor:
    # Activation checkpointing and torch.compile put names of their own into those of parameters.
    name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
    try:
        if FUSED in name:
            parts = [named.read(name.replace(FUSED, f".{part}.")) for part in ("wq", "wk", "wv")]
            return _fuse_projections(parts, spec)
        return named.read(name)
    except KeyError:
        raise PrimusError(
            f"torchtitan's parameter {name} is not among the weights of this model",
            f"this version of torchtitan names it differently: {PROGRAM} engines shows the versions",
        ) from None


def _fuse_projections(parts: list[Tensor], spec: ModelSpec) -> Tensor:
    """For each key/value head the rows of its queries, its key, its value."""
    groups, width = num_query_groups(spec), head_dim(spec)
    by_group = [part.unflatten(0, (groups, -1, width)) for part in parts]
    return torch.cat(by_group, 1).flatten(0, 2)


def _fill_parameter(parameter: Tensor, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        # A replicated tensor is cut where it is, so that every process takes its shard of what it has read itself.
        mesh = parameter.device_mesh
        on_device = value.to(parameter.device, parameter.dtype)
        value = DTensor.from_local(on_device, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.copy_(value)

"""Checkpoints of megatron-core in its format `torch_dist`: weights, optimizer and random states."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from primus.errors import PrimusError
from primus.frameworks.megatron.checkpoint import find_param_groups
from primus.session.checkpoints.optimizer_settings import keep_settings

VERSION = 3.0
"""`checkpoint_version` of Megatron-LM (megatron/training/checkpointing.py): order of the rows of `linear_qkv`."""
SHARDING = "distrib_optim_sharding_type"
METADATA = {
    SHARDING: "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""The form of the optimizer's state: by weight, so that other layouts can read it."""
OWN_OPTIMIZER, EXPERT_GROUP = "own_optimizer", "is_expert_parallel"
RNG_STATE = "rng_state"
SCHEDULER = "opt_param_scheduler"
"""Key of the scheduler's state, as in Megatron-LM (megatron/training/checkpointing.py)."""


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Any, num_steps: int, scheduled_samples: int | None = None
) -> None:
    """Write the state of all processes into an empty folder; returns when the files are on disk.

    Args:
        folder: Of the checkpoint.
        model: Without its wrappers.
        optimizer: Of megatron-core.
        num_steps: Optimizer steps.
        scheduled_samples: Count of Megatron's scheduler, if it is used.
    """
    _create_adam_state(optimizer)
    state = _collect_state(model, optimizer, is_loading=False)
    state |= {"checkpoint_version": VERSION, "iteration": num_steps, "layout": _describe_layout(optimizer)}
    if scheduled_samples is not None:
        state[SCHEDULER] = {"num_steps": scheduled_samples}
    dist_checkpointing.save(state, str(folder), validate_access_integrity=False, content_metadata=dict(METADATA))


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Any) -> tuple[int, int | None]:
    """Restore what `save_checkpoint` wrote; gives its number of steps, and the count of Megatron's scheduler.

    Random states are restored only in the layout in which they were saved: they belong to its ranks.

    Raises:
        PrimusError: The checkpoint was written with another kind of optimizer.
    """
    common = dist_checkpointing.load_common_state_dict(str(folder))
    own, saved = _describe_layout(optimizer), common.get("layout", {})
    if saved.get("use_distributed_optimizer") != own["use_distributed_optimizer"]:
        raise PrimusError(
            f"{folder}: its optimizer state was saved with use_distributed_optimizer:"
            f" {str(saved.get('use_distributed_optimizer')).lower()}",
            "use the same setting, or load only the weights: finetune: true",
        )
    _create_adam_state(optimizer)
    names = FileSystemReader(str(folder)).read_metadata().state_dict_metadata.keys()
    layers = {"non_homogeneous_layers": any(name.startswith("decoder.layers.0.") for name in names)}
    state = _collect_state(model, optimizer, is_loading=True, others=layers)
    if saved != own:
        del state[RNG_STATE]
    absent = _drop_absent_extra_states(state["model"], names)
    if own["use_distributed_optimizer"]:
        # Under another key than in the file, whose part of it may be of another number of optimizers.
        state[OWN_OPTIMIZER] = state.pop("optimizer")
    loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    if own["use_distributed_optimizer"]:
        loaded["optimizer"] = _join_optimizer(loaded[OWN_OPTIMIZER], loaded["optimizer"])
    loaded["model"] |= dict.fromkeys(absent)
    model.load_state_dict(loaded["model"])
    with keep_settings(lambda: optimizer.param_groups):
        optimizer.load_state_dict(loaded["optimizer"])
    _separate_step_counts(optimizer)
    if RNG_STATE in loaded:
        _restore_random_state(loaded[RNG_STATE][0])
    return int(common["iteration"]), common.get(SCHEDULER, {}).get("num_steps")


def _drop_absent_extra_states(state: dict[str, Any], saved: Collection[str]) -> list[str]:
    """Remove the states of fp8 scaling that a converted checkpoint lacks; gives their names."""
    extra = [name for name, value in state.items() if name.endswith("_extra_state") and value is not None]
    absent = [name for name in extra if not any(key.startswith(f"{state[name].key}/") for key in saved)]
    for name in absent:
        del state[name]
    return absent


def _collect_state(
    model: nn.Module, optimizer: Any, is_loading: bool, others: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The tree of sharded tensors of this process, with the names that Megatron-LM uses."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    metadata = METADATA | dict(others) | groups
    weights = model.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata),
        RNG_STATE: _shard_random_state(),
    }


def _join_optimizer(own: dict[Any, Any], saved: Any) -> dict[Any, Any]:
    """The state of this layout's optimizers: sharded tensors, and settings of parameter groups from the file.

    With expert parallelism experts have an optimizer of their own, and a group that says so; without it they have none
    (megatron/core/optimizer/__init__.py, get_megatron_optimizer).
    """
    groups = find_param_groups(saved)
    groups += [group | {EXPERT_GROUP: not group[EXPERT_GROUP]} for group in groups if EXPERT_GROUP in group]
    groups.reverse()  # megatron-core takes the last of equal groups: those of the file
    settings = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": METADATA[SHARDING]}
    return {number: each | settings for number, each in own.items()} if 0 in own else own | settings


def _describe_layout(optimizer: Any) -> dict[str, int | bool]:
    return {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
        "use_distributed_optimizer": optimizer.config.use_distributed_optimizer,
    }


def _shard_random_state() -> ShardedObject:
    """The generators of this process, in the form of Megatron-LM (megatron/training/checkpointing.py)."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # One for each process: with Megatron-LM's key by stage and tensor rank, data-parallel ranks would share one.
    return ShardedObject(RNG_STATE, [state], (size,), (rank,), replica_id=0)


def _restore_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])


def _create_adam_state(optimizer: Any) -> None:
    """Create the state of torch's AdamW as its first step does (torch/optim/adamw.py, `_init_group`).

    megatron-core asserts that a step was taken before a checkpoint. The optimizers of Apex and Transformer Engine keep
    the number of steps elsewhere; megatron-core creates their state itself.
    """
    for inner in _list_torch_optimizers(optimizer):
        for group in inner.param_groups:
            for weight in group["params"]:
                state = inner.state[weight]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)


def _separate_step_counts(optimizer: Any) -> None:
    """Give each weight its own step count.

    On loading megatron-core gives one tensor to all weights, and AdamW then counts a step for each of them.
    """
    for inner in _list_torch_optimizers(optimizer):
        for state in inner.state.values():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).clone()


def _list_torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch inside those of megatron-core."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each.optimizer for each in chained if isinstance(each.optimizer, (torch.optim.AdamW, torch.optim.Adam))]

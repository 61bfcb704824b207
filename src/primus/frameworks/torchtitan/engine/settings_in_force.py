"""The settings in force of a run of torchtitan, read from its model, optimizers, meshes and first step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.trainer import Trainer as TitanTrainer

from primus.config.schema import Trainer
from primus.config.source import flatten_settings
from primus.frameworks.torchtitan.backend_settings import MODE
from primus.session.settings.settings_in_force import APPLIED_NORM, LiveSetting, explain_settings
from primus.session.settings.torch_settings import (
    StepWatch,
    is_model_compiled,
    measure_applied_norm,
    read_torch_settings,
)

IMPLEMENTATION = "optimizer.implementation"
OFFLOAD = "training.enable_cpu_offload"
MODES = {True: "full", False: "none"}
"""Mode of the activation checkpoint by what `recompute_activations` means by it."""


def read_settings(titan: TitanTrainer, trainer: Trainer, watch: StepWatch) -> list[LiveSetting]:
    """The settings that the objects of torchtitan's trainer have after the step that `watch` saw."""
    model = titan.model_parts[0]
    found = {each.key: each.value for each in read_torch_settings(model, titan.optimizers, watch)}
    found["recompute_activations"] = _read_recomputation(model, found.get("recompute_activations"))
    found |= _read_layout(titan)
    found |= _read_backend_settings(titan, flatten_settings(trainer.backend_args), found)
    found["compile"] = is_model_compiled(model)
    found["fp8"] = trainer.training.fp8 if any("Float8" in type(each).__name__ for each in model.modules()) else None
    found["clip_grad"] = 0.0 if math.isinf(titan.config.training.max_norm) else titan.config.training.max_norm
    if not titan.parallel_dims.pp_enabled:  # a stage has a part of the gradient
        found[APPLIED_NORM] = measure_applied_norm(titan.optimizers)
    live = [LiveSetting(key=key, value=value) for key, value in found.items()]
    return explain_settings(live, dict(_list_reasons(titan, trainer)))


def _read_recomputation(model: nn.Module, seen: bool | str | None) -> bool | str:
    """What the first step showed; of a compiled model what its layers are wrapped in."""
    wrapped = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    # A policy for each operator runs all modules again, and takes the results of some operators from the first pass.
    if any("context_fn" in getattr(each.checkpoint_fn, "keywords", {}) for each in wrapped):
        return "selective"
    return bool(wrapped) if seen is None else seen


def _read_layout(titan: TitanTrainer) -> dict[str, int | bool]:
    sizes = titan.parallel_dims
    found: dict[str, int | bool] = {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
    }
    if sizes.dp_shard * sizes.dp_replicate > 1:  # else there is nothing to shard
        found["use_distributed_optimizer"] = sizes.dp_shard > 1
    return found


def _read_backend_settings(
    titan: TitanTrainer, asked: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Fields that `backend_args` sets: by the object that shows them, else as the trainer has them."""
    for path in asked:
        if path == MODE:
            recomputed = found["recompute_activations"]
            yield path, MODES.get(recomputed, recomputed)
        elif path == IMPLEMENTATION:
            is_narrow = found.get("moment_dtype") == "bfloat16"
            yield path, "fused_opt_states_bf16" if is_narrow else found["optimizer_implementation"]
        elif path == OFFLOAD and titan.device.type != "cpu":
            yield path, found["parameter_device"] == "cpu"
        else:
            yield path, _read_field(titan.config, path)


def _read_field(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _list_reasons(titan: TitanTrainer, trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Why torchtitan may have another value than the key asks for."""
    asked = flatten_settings(trainer.backend_args)
    if MODE in asked:
        yield "recompute_activations", f"{MODE}: {asked[MODE]}"
        if asked[MODE] == "memory_budget":
            yield MODE, "the compiler decides by its budget"
    if titan.parallel_dims.cp > 1:
        yield "seq_length", "context parallelism gives each process a part of the sequence"

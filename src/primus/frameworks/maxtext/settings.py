"""The configuration of MaxText that an experiment becomes; needs no tensor library."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Any

from primus.config.exports.foreign_text import find_head_width
from primus.config.exports.hugging_face import format_model_config
from primus.config.extended_files import load_model
from primus.config.schema import OWNERS, ModelSpec, Trainer
from primus.config.source import ConfigValue, format_yaml_value
from primus.config.translation.known_keys import KnownKey
from primus.engine_keys import read_key_rules, write_keys
from primus.errors import UsageError, did_you_mean
from primus.frameworks.maxtext.export_file import find_expert_width, has_experts_only, write_model_settings
from primus.frameworks.maxtext.names import FOLDER, MODELS, RENAMED, UNDECAYED, read_settings

MODEL_NAME = "model_name"
"""Setting that chooses a model of MaxText's configs/models."""
GPU_ATTENTION = ("cudnn_flash_te", "cudnn_flash_jax", "flash")
"""Attention kernels that CPUs lack; `dot_product` computes the same there."""
REPLACED = {
    "base_output_directory": "workspace",
    "run_name": "exp_name",
    "hardware": "device",
    "dtype": "bf16",
    "per_device_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "dataset_type": "train_data_path, dataset or mock_data",
    "enable_checkpointing": "save_interval and disable_last_saving",
    "checkpoint_period": "save_interval",
    "learning_rate": "lr",
}
"""Further settings whose work primus does, and the keys that set them."""


def is_built_in(trainer: Trainer) -> bool:
    """Whether the experiment names a model of MaxText, whose shape MaxText then knows itself."""
    return trainer.backend_args.get(MODEL_NAME) in MODELS


def has_hub_weights(trainer: Trainer) -> bool:
    """Whether the weights of the model have names on the Hugging Face Hub here: Llama, Qwen, Mixtral, Qwen3-MoE."""
    spec = trainer.model
    if spec.multi_latent_attention or spec.ffn_activation != "silu":
        return False
    if spec.num_experts and not _has_hub_experts(spec):
        return False
    try:
        write_model_settings(spec)
    except UsageError:
        return False
    return True


def _has_hub_experts(spec: ModelSpec) -> bool:
    """Whether every layer has the experts of Mixtral or Qwen3-MoE, as transformers has them."""
    others = (spec.moe_shared_expert_intermediate_size, spec.moe_router_enable_expert_bias, spec.first_k_dense_replace)
    if any((*others, spec.add_qkv_bias)):
        return False
    try:
        format_model_config(spec)
    except UsageError:
        return False
    return True


def write_model(trainer: Trainer) -> dict[str, ConfigValue]:
    """Settings of the model: its name in MaxText and what differs from that model, or its whole shape.

    Raises:
        UsageError: MaxText cannot build the model.
    """
    if not is_built_in(trainer):
        return write_model_settings(trainer.model)
    name = trainer.backend_args[MODEL_NAME]
    preset = load_model(MODELS[name])
    settings = {theirs: ours for theirs, ours in RENAMED.items() if OWNERS.get(ours) == "model"}
    changed = {
        theirs: _read_shape(trainer.model, ours)
        for theirs, ours in settings.items()
        if _read_shape(trainer.model, ours) != _read_shape(preset, ours)
    }
    if changed.keys() & {"base_mlp_dim", "base_moe_mlp_dim"} and has_experts_only(trainer.model):
        changed |= dict.fromkeys(("base_mlp_dim", "base_moe_mlp_dim"), find_expert_width(trainer.model))
    return {MODEL_NAME: name, "override_model_config": True} | changed


def _read_shape(model: ModelSpec, key: str) -> Any:
    """A size of a model; one that follows from others as a number, because MaxText's own model states it."""
    if key == "num_query_groups":
        return model.num_query_groups or model.num_attention_heads
    if key == "kv_channels" and not model.multi_latent_attention:
        return find_head_width(model)
    return getattr(model, key)


FIXED_SETTINGS: dict[str, ConfigValue] = {
    "run_name": "maxtext",
    # The processes have joined, and primus reads the data, reports the steps and saves the checkpoints.
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "log_config": False,
    "dataset_type": "synthetic",
    "packing": False,
    "enable_dropout": False,
    # Only a warning of MaxText about small models that are not sharded evenly.
    "sharding_tolerance": 1.0,
    "weight_dtype": "float32",
    "opt_type": "adamw",
}
"""Settings that no experiment changes, unless by `backend_args`."""


def build_settings(
    trainer: Trainer, folder: Path, on_cpu: bool, batch_per_device: float, num_micro_batches: int
) -> dict[str, ConfigValue]:
    """All settings that differ from MaxText's base.yml.

    Args:
        trainer: The experiment.
        folder: For files that MaxText writes.
        on_cpu: Whether CPUs train.
        batch_per_device: Sequences of one pass for each device of the run.
        num_micro_batches: Passes of one optimizer step.

    Raises:
        UsageError: MaxText cannot build the model.
    """
    training, parallel, optimizer = trainer.training, trainer.parallel, trainer.optimizer
    kind = "bfloat16" if training.bf16 else "float32"
    is_sharded = parallel.use_distributed_optimizer
    settings: dict[str, ConfigValue] = FIXED_SETTINGS | {
        "base_output_directory": str(folder),
        "hardware": "cpu" if on_cpu else "gpu_multiprocess",
        **write_keys(FOLDER, training, "train_iters", "seq_length"),
        "per_device_batch_size": batch_per_device,
        "gradient_accumulation_steps": num_micro_batches,
        "dtype": kind,
        "matmul_precision": "default" if training.bf16 else "highest",
        "remat_policy": "full" if training.recompute_activations else "minimal",
        "init_weights_seed": training.seed,
        **write_keys(FOLDER, optimizer, "lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"),
        "adamw_mask": list(UNDECAYED),
        "ici_fsdp_parallelism": -1 if is_sharded else 1,
        "ici_data_parallelism": 1 if is_sharded else -1,
        **write_keys(FOLDER, parallel, "tensor_model_parallel_size"),
        "ici_expert_parallelism": parallel.expert_model_parallel_size,
    }
    if training.fp8:
        settings["quantization"] = "fp8"
    settings |= write_model(trainer) | trainer.backend_args
    if on_cpu and settings.get("attention", "autoselected") in (*GPU_ATTENTION, "autoselected"):
        settings["attention"] = "dot_product"
    if on_cpu:
        settings["num_slices"] = 1
    if settings.get("optimizer_memory_host_offload"):
        settings["log_step_diagnostics"] = True  # without it MaxText then computes no norm of the gradient
    return settings


def check_settings(trainer: Trainer) -> None:
    """Accept settings of MaxText that no key of primus sets.

    Raises:
        UsageError: A setting does not exist, has another type, or is set by a key of the experiment.
    """
    known = read_settings().keys
    replaced = REPLACED | {rule.field: key for key, rule in read_key_rules(FOLDER).items() if rule.field}
    for name, value in trainer.backend_args.items():
        found = f"backend_args: {name}: {format_yaml_value(value)}"
        if name not in known:
            raise UsageError(f"backend_args: MaxText has no setting '{name}'", did_you_mean(name, list(known)))
        if name in replaced and name not in _ENGINE_ONLY:
            raise UsageError(f"{found}: primus sets it", f"use the keys of the experiment: {replaced[name]}")
        if not _accepts(known[name], value):
            raise UsageError(f"{found}: must be of the type of {known[name].default!r}", "see docs/engine-maxtext.md")
    model = trainer.backend_args.get(MODEL_NAME)
    if model is not None and model not in MODELS:
        near = did_you_mean(str(model), list(MODELS))
        raise UsageError(f"backend_args: model_name: {model}: no preset has this model", near)


_ENGINE_ONLY = frozenset(
    "decoder_block remat_policy quantization ici_fsdp_parallelism ici_expert_parallelism ici_data_parallelism".split()
)
"""Settings that are finer than the key that sets them."""


def _accepts(known: KnownKey, value: Any) -> bool:
    """Whether a value may be that of a setting; an empty or null default says nothing about the type."""
    kinds: dict[str, type | UnionType] = {"int": int, "float": int | float, "bool": bool, "str": str}
    kind = kinds.get(known.kind)
    if kind is None or value is None or known.default in (None, ""):
        return True
    if known.kind == "int" and isinstance(value, float):
        return True  # MaxText reads both, such as a capacity factor
    return isinstance(value, kind) and (known.kind == "bool" or not isinstance(value, bool))


def uses_default_rope(spec: ModelSpec) -> bool:
    """Whether MaxText rotates halves of a head, as native does, not neighbors."""
    return spec.rope_type == "default"

"""An experiment as megatron-core's own configuration objects; `keys.yaml` names the field of each key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from primus.config.schedule import find_final_learning_rate
from primus.config.schema import OWNERS, Trainer
from primus.engine_keys import read_key_rules
from primus.errors import UsageError
from primus.models.counts import expert_ffn_size, head_dim, list_layers, num_query_groups

FOLDER = Path(__file__).parents[1]
VOCABULARY_DIVISOR, DEFAULT_DIVISOR = "make_vocab_size_divisible_by", 128
"""Setting of `backend_args` and its default in Megatron-LM (megatron/training/arguments.py)."""
Values = dict[str, object]


def find_vocabulary_divisor(trainer: Trainer) -> int:
    """The number of which the rows of the vocabulary on each rank are a multiple."""
    return int(trainer.backend_args.get(VOCABULARY_DIVISOR) or DEFAULT_DIVISOR)


def compute_padded_vocab_size(trainer: Trainer) -> int:
    """Rows of the embedding over all ranks (`vocab_size_with_padding` of Megatron-LM, megatron/training/tokenizer)."""
    multiple = find_vocabulary_divisor(trainer) * trainer.parallel.tensor_model_parallel_size
    return -(-trainer.model.vocab_size // multiple) * multiple


def _list_expert_layers(trainer: Trainer) -> list[int] | int:
    """1 for each layer with experts, 0 for each dense one."""
    kinds = [int(layer.moe) for layer in list_layers(trainer.model)] if trainer.model.num_experts else [1]
    # With a list, checkpoints have a name for each layer; with 1, Megatron-LM's default, layers are stacked.
    return 1 if all(kinds) else kinds


def _list_windowed_layers(trainer: Trainer) -> list[int] | None:
    """1 for each layer with the window, 0 for each with full attention; None if all have it."""
    model = trainer.model
    if model.window_size is None or model.window_layer_period == 1:
        return None
    return [int(layer % model.window_layer_period == 0) for layer in range(model.num_layers)]


CONVERSIONS: Mapping[str, Callable[[Trainer], Any]] = {
    "vocab_size": compute_padded_vocab_size,
    "num_query_groups": lambda trainer: num_query_groups(trainer.model),
    "kv_channels": lambda trainer: head_dim(trainer.model),
    "untie_embeddings_and_output_weights": lambda trainer: not trainer.model.untie_embeddings_and_output_weights,
    "ffn_activation": lambda trainer: torch.nn.functional.silu,
    # The pair is (tokens before, tokens after); the window of the schema counts the token itself.
    "window_size": lambda trainer: (trainer.model.window_size - 1, 0) if trainer.model.window_size else None,
    "window_layer_period": _list_windowed_layers,
    "moe_ffn_hidden_size": lambda trainer: expert_ffn_size(trainer.model) if trainer.model.num_experts else None,
    "first_k_dense_replace": _list_expert_layers,
    # Softmax over the chosen experts equals softmax over all, renormalized over the chosen ones.
    "moe_router_pre_softmax": lambda trainer: (
        trainer.model.moe_router_pre_softmax and not trainer.model.moe_router_norm_topk_prob
    ),
    "moe_router_topk_scaling_factor": lambda trainer: (
        None if trainer.model.moe_router_topk_scaling_factor == 1 else trainer.model.moe_router_topk_scaling_factor
    ),
    "recompute_activations": lambda trainer: "full" if trainer.training.recompute_activations else None,
    "optimizer": lambda trainer: "adam",
    # Megatron-LM turns it off as well where there is nothing to split (megatron/training/arguments.py).
    "sequence_parallel": lambda trainer: (
        trainer.parallel.sequence_parallel and trainer.parallel.tensor_model_parallel_size > 1
    ),
}
"""The values that are not those of the experiment as they are, by key."""


def collect_values(trainer: Trainer, target: str, except_group: str = "") -> Values:
    """The arguments of one target of `keys.yaml` (``transformer``, ``groups``, ...) by name, without one group's."""
    values = {}
    for key, rule in read_key_rules(FOLDER).items():
        owner, _, name = rule.field.partition(".")
        if owner == target and OWNERS[key] != except_group:
            convert = CONVERSIONS.get(key)
            values[name] = convert(trainer) if convert else getattr(getattr(trainer, OWNERS[key]), key)
    return values


def build_transformer_config(
    trainer: Trainer, device_type: str, use_transformer_engine: bool, extra: Mapping[str, Any]
) -> TransformerConfig:
    """The configuration of the model.

    Args:
        trainer: The experiment's module.
        device_type: ``cpu`` or ``cuda``.
        use_transformer_engine: Whether its layers are used.
        extra: Fields of the user, over those of the experiment.
    """
    on_gpu = device_type == "cuda"
    values = collect_values(trainer, "transformer") | build_fixed_values(trainer, on_gpu)
    values |= {"normalization": "RMSNorm", "gated_linear_unit": True}
    values["moe_grouped_gemm"] = use_transformer_engine
    if trainer.model.num_experts is None:
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}
    kind: type[TransformerConfig] = TransformerConfig
    if trainer.model.multi_latent_attention:
        kind = MLATransformerConfig
        values |= collect_values(trainer, "mla") | _build_latent_attention_values(trainer)
    return _build(kind, values | dict(extra))


def build_fixed_values(trainer: Trainer, on_gpu: bool) -> Values:
    """What follows from the framework, not from a key of the experiment or from the model."""
    parallel, training = trainer.parallel, trainer.training
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    whole_layers = {"recompute_method": "uniform", "recompute_num_layers": 1}
    has_aux_loss = trainer.model.moe_aux_loss_coeff > 0
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        # The loss is the sum over the tokens that count, divided by their number in the global batch.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_model_grads,
        "use_cpu_initialization": not on_gpu,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        # Kernels of Apex and of Transformer Engine, which may be missing.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "moe_router_load_balancing_type": "aux_loss" if has_aux_loss else "none",
        # alltoall moves only the tokens that an expert gets; gloo has no exchange of unequal parts.
        "moe_token_dispatcher_type": "alltoall" if on_gpu else "allgather",
        **(whole_layers if training.recompute_activations else {}),
    }


def _build_latent_attention_values(trainer: Trainer) -> Values:
    model = trainer.model
    return {
        "multi_latent_attention": True,
        "rope_type": "yarn" if model.rope_type == "yarn" else "rope",
        "rotary_base": model.rotary_base,
        "rotary_scaling_factor": model.rotary_scaling_factor,
        "original_max_position_embeddings": model.original_max_position_embeddings,
    }


def build_ddp_config(trainer: Trainer, extra: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """The configuration of data parallelism; gradients are reduced in fp32."""
    values = {"grad_reduce_in_fp32": True} | collect_values(trainer, "ddp")
    return _build(DistributedDataParallelConfig, values | dict(extra))


def build_optimizer_config(trainer: Trainer, extra: Mapping[str, Any]) -> OptimizerConfig:
    """The configuration of the optimizer."""
    values = collect_values(trainer, "optimizer") | {
        "bf16": trainer.training.bf16,
        "params_dtype": torch.bfloat16 if trainer.training.bf16 else torch.float32,
        "use_distributed_optimizer": trainer.parallel.use_distributed_optimizer,
        "min_lr": find_final_learning_rate(trainer.optimizer),
    }
    return _build(OptimizerConfig, values | dict(extra))


def _build(kind: type[Any], values: Values) -> Any:
    """An object of megatron-core from its fields.

    Raises:
        UsageError: megatron-core refuses the values; the message has its own reason.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(name for name, value in values.items() if name not in names and value not in (None, False))
    if unknown:
        raise UsageError(
            f"{kind.__name__} of this megatron-core has no field {', '.join(unknown)}", "remove the setting"
        )
    try:
        return kind(**{name: value for name, value in values.items() if name in names})
    except (ValueError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"megatron-core refuses the configuration: {reason}", "change the setting that it names"
        ) from error

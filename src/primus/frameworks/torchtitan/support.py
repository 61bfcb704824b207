"""Check that torchtitan can train an experiment; needs no tensor library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from primus.config.schema import OWNERS, Experiment, ModelSpec, ParallelConfig, Trainer
from primus.config.source import format_yaml_value
from primus.engine_keys import check_key_rules, read_key_rules
from primus.errors import UsageError
from primus.frameworks.torchtitan.backend_settings import check_settings
from primus.frameworks.torchtitan.families import find_family
from primus.models.counts import num_query_groups
from primus.session.checks import check_session

ANOTHER_FRAMEWORK = "choose another model or framework"


def check(experiment: Experiment) -> None:
    """Accept an experiment that torchtitan can train.

    Raises:
        UsageError: It asks for something that torchtitan does not support; names the key, the reason and the fix.
    """
    trainer = experiment.trainer
    check_key_rules("torchtitan", read_key_rules(Path(__file__).parent), trainer)
    problems = [
        *_list_model_problems(trainer.model),
        *_list_chunk_problems(trainer.model, trainer.training.seq_length),
        *_list_layout_problems(trainer.model, trainer.parallel),
    ]
    for key, reason, hint in problems:
        raise UsageError(f"{key}: {_format_value(trainer, key)}: {reason}", hint)
    if trainer.training.device == "cpu":
        check_for_cpu(trainer)
    check_settings(trainer.backend_args)
    check_session(trainer, "torchtitan")


def check_for_cpu(trainer: Trainer) -> None:
    """Accept what torchtitan can train without a GPU; called again where the workers find none.

    Raises:
        UsageError: Something needs a GPU.
    """
    parallel = trainer.parallel
    needs_gpu = [
        ("context_parallel_size", parallel.context_parallel_size, 1, "attention over several processes"),
        ("expert_model_parallel_size", parallel.expert_model_parallel_size, 1, "the exchange of tokens of experts"),
        ("reset_attention_mask", trainer.data.reset_attention_mask, False, "attention within documents"),
        ("attention_sinks", trainer.model.attention_sinks, False, "attention sinks"),
        ("fp8", trainer.training.fp8, None, "8-bit floating point"),
    ]
    for key, value, on_cpu, what in needs_gpu:
        if value != on_cpu:
            raise UsageError(
                f"{key}: {format_yaml_value(value)}: torchtitan has {what} on GPUs only",
                f"set {key}: {format_yaml_value(on_cpu)}, or train on GPUs",
            )


def _list_model_problems(spec: ModelSpec) -> Iterator[tuple[str, str, str]]:
    """Features that one of torchtitan's models has, but not the model that this one becomes."""
    family = find_family(spec)
    if spec.rope_type == "yarn" and family not in ("deepseek", "gpt_oss"):
        yield "rope_type", "torchtitan has yarn rope scaling in DeepSeek-V3 and gpt-oss models only", ANOTHER_FRAMEWORK
    if spec.rope_type == "yarn" and family == "deepseek" and spec.mscale != spec.mscale_all_dim:
        reason = f"torchtitan scales the rotated part of a head as the rest, mscale_all_dim {spec.mscale_all_dim}"
        yield "mscale", reason, "set mscale and mscale_all_dim to one value, as the published DeepSeek models do"
    if family == "gpt_oss":
        yield from _list_sink_problems(spec)
        return
    if spec.window_size is not None:
        yield "window_size", "torchtitan has windows in gpt-oss models (attention_sinks) only", ANOTHER_FRAMEWORK
    if spec.add_bias_linear:
        yield (
            "add_bias_linear",
            "torchtitan has these biases in gpt-oss models (attention_sinks) only",
            ANOTHER_FRAMEWORK,
        )
    if spec.activation_clamp is not None:
        reason = "torchtitan clamps activations in gpt-oss models (attention_sinks) only"
        yield "activation_clamp", reason, ANOTHER_FRAMEWORK
    if family == "deepseek" and (spec.qk_layernorm or spec.add_qkv_bias):
        key = "qk_layernorm" if spec.qk_layernorm else "add_qkv_bias"
        yield key, "torchtitan's latent attention does not have it", ANOTHER_FRAMEWORK


def _list_chunk_problems(spec: ModelSpec, seq_length: int) -> Iterator[tuple[str, str, str]]:
    """Chunks within a sequence, and layers without rotary embedding in other models than Llama 4."""
    if spec.attention_chunk_size is not None and spec.attention_chunk_size < seq_length:
        reason = f"torchtitan attends over the whole sequence, of {seq_length} tokens"
        yield "attention_chunk_size", reason, f"set seq_length to at most {spec.attention_chunk_size}"
    if spec.no_rope_freq is not None and (
        spec.num_experts is None or spec.multi_latent_attention or spec.attention_sinks or spec.qk_layernorm
    ):
        reason = "torchtitan has layers without rotary embedding in models of the shape of Llama 4 only"
        yield "no_rope_freq", reason, ANOTHER_FRAMEWORK


def _list_sink_problems(spec: ModelSpec) -> Iterator[tuple[str, str, str]]:
    reason = "torchtitan has attention sinks in models of the shape of gpt-oss only"
    needed = {
        "num_experts": spec.num_experts is not None,
        "add_qkv_bias": spec.add_qkv_bias,
        "add_bias_linear": spec.add_bias_linear,
        "activation_clamp": spec.activation_clamp is not None,
    }
    missing = [key for key, is_set in needed.items() if not is_set]
    if missing:
        yield "attention_sinks", f"{reason}, which needs {' and '.join(missing)}", ANOTHER_FRAMEWORK
    if spec.qk_layernorm or spec.multi_latent_attention or spec.first_k_dense_replace:
        yield "attention_sinks", f"{reason}: no query norms, latent attention or dense layers", ANOTHER_FRAMEWORK


def _list_layout_problems(spec: ModelSpec, parallel: ParallelConfig) -> Iterator[tuple[str, str, str]]:
    stages, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    if stages > 1 and not spec.untie_embeddings_and_output_weights:
        reason = "torchtitan does not split a model whose embedding is its output head"
        hint = "share the model by tensor_model_parallel_size or FSDP, or set untie_embeddings_and_output_weights: true"
        yield "pipeline_model_parallel_size", reason, hint
    if stages > spec.num_layers:
        yield "pipeline_model_parallel_size", f"the model has {spec.num_layers} layers", "use fewer stages"
    groups = num_query_groups(spec)
    if not spec.multi_latent_attention and groups % tensor:
        reason = f"torchtitan gives each process whole key/value heads, and {groups} do not divide"
        yield "tensor_model_parallel_size", reason, f"use a divisor of num_query_groups {groups}"


def _format_value(trainer: Trainer, key: str) -> str:
    return format_yaml_value(getattr(getattr(trainer, OWNERS[key]), key))

"""Check that the native framework can train an experiment; needs no tensor library."""

from __future__ import annotations

from msgspec import structs

from primus.checkpoint.folders import is_foreign
from primus.config.schema import Experiment, ModelSpec, ParallelConfig, Trainer
from primus.config.source import format_yaml_value
from primus.errors import UsageError
from primus.models import model_checks
from primus.session.checks import check_no_backend_args, check_session
from primus.session.settings.adapter_settings import AdapterSettings, check_targets, read_settings

OTHER_BACKENDS = "choose a dense Llama or Qwen model, or another framework"
ADAPTER_KEYS = tuple(AdapterSettings.__struct_fields__)
"""Keys under `overrides:` besides those of the schema."""
DATA_PARALLEL = "set it to its default: native shards a model over all processes (FSDP2); or choose another framework"


def check(experiment: Experiment) -> None:
    """Accept an experiment that native can train.

    Raises:
        UsageError: The experiment uses something that native does not support; names the field and the fix.
    """
    trainer = experiment.trainer
    check_model(trainer.model)
    _refuse_fields(_find_unsupported_layout_fields(trainer.parallel), trainer.parallel, DATA_PARALLEL)
    if trainer.training.fp8:
        raise UsageError(
            f"fp8: {trainer.training.fp8}: native trains in bf16 or fp32",
            "set fp8: null, or choose a framework that supports fp8 (torchtitan, megatron)",
        )
    _check_rewinds(trainer)
    check_session(trainer, "native")
    _check_adapters(trainer)


def check_model(spec: ModelSpec) -> None:
    """Accept a model that native supports: dense, with grouped-query attention.

    Raises:
        UsageError: The shape is impossible, or has something that native does not support; names the field.
    """
    _refuse_fields(_find_unsupported_model_fields(spec), spec, OTHER_BACKENDS)
    model_checks.check(spec)


def _check_rewinds(trainer: Trainer) -> None:
    """Reject a rewind policy without checkpoints to go back to."""
    for policy in ("nonfinite_policy", "loss_spike_policy"):
        if getattr(trainer.training, policy) == "rewind" and trainer.checkpoint.save_interval is None:
            raise UsageError(f"{policy}: rewind needs checkpoints, and save_interval is not set", "set save_interval")


def _check_adapters(trainer: Trainer) -> None:
    """Check the settings of adapters; they need a model that can be loaded again."""
    others = {key: value for key, value in trainer.backend_args.items() if key not in ADAPTER_KEYS}
    check_no_backend_args(structs.replace(trainer, backend_args=others), "native")
    if not trainer.backend_args:
        return
    settings = read_settings(trainer.backend_args, AdapterSettings)
    if settings.peft == "none":
        return
    if settings.peft != "lora":
        raise UsageError(f"peft: {settings.peft}: native trains lora", "set peft: lora, or framework: megatron_bridge")
    check_targets(settings)
    load, finetune = trainer.checkpoint.load, trainer.checkpoint.finetune
    if load is None or not (finetune or is_foreign(load)):
        problem = "load names no model to adapt" if load is None else "training cannot continue from load"
        raise UsageError(f"peft: lora: {problem}", "set load: CHECKPOINT and finetune: true")


def _refuse_fields(fields: dict[str, str], group: ModelSpec | ParallelConfig, hint: str) -> None:
    for field, what in fields.items():
        raise UsageError(f"{field}: {format_yaml_value(getattr(group, field))}: native does not support {what}", hint)


def _find_unsupported_model_fields(spec: ModelSpec) -> dict[str, str]:
    """Settings of a model that native does not support, with their meaning."""
    asked = {
        "num_experts": (spec.num_experts is not None, "mixture-of-experts layers"),
        "multi_latent_attention": (spec.multi_latent_attention, "multi-head latent attention"),
        "mtp_num_layers": (spec.mtp_num_layers > 0, "multi-token prediction"),
        "window_size": (spec.window_size is not None, "sliding-window attention"),
        "hybrid_layer_pattern": (spec.hybrid_layer_pattern is not None, "layers of several kinds"),
        "attention_output_gate": (spec.attention_output_gate, "gated attention"),
        "qk_layernorm_across_heads": (spec.qk_layernorm_across_heads, "query and key norms across heads"),
        "no_rope_freq": (spec.no_rope_freq is not None, "layers without rotary embedding"),
        "attention_chunk_size": (spec.attention_chunk_size is not None, "chunked attention"),
        "rotary_percent": (spec.rotary_percent < 1, "partial rotary embedding"),
        "post_layernorm": (spec.post_layernorm, "norms after attention and feed-forward"),
        "final_logit_softcapping": (spec.final_logit_softcapping is not None, "soft-capped logits"),
        "ffn_activation": (spec.ffn_activation != "silu", "another activation than SiLU"),
        "num_residual_streams": (spec.num_residual_streams > 1, "hyper-connections"),
        "attn_res_block_size": (spec.attn_res_block_size is not None, "attention residuals"),
        "attention_sinks": (spec.attention_sinks, "attention sinks"),
        "activation_clamp": (spec.activation_clamp is not None, "the clamped SwiGLU"),
        "add_bias_linear": (spec.add_bias_linear, "a bias on every projection"),
        "rope_type": (spec.rope_type == "yarn", "yarn rope scaling"),
    }
    return {field: what for field, (is_asked, what) in asked.items() if is_asked}


def _find_unsupported_layout_fields(parallel: ParallelConfig) -> dict[str, str]:
    """Settings of a layout that native does not support, with their meaning."""
    asked = {
        "tensor_model_parallel_size": (parallel.tensor_model_parallel_size > 1, "tensor parallelism"),
        "pipeline_model_parallel_size": (parallel.pipeline_model_parallel_size > 1, "pipeline parallelism"),
        "context_parallel_size": (parallel.context_parallel_size > 1, "context parallelism"),
        "expert_model_parallel_size": (parallel.expert_model_parallel_size > 1, "expert parallelism"),
        "sequence_parallel": (parallel.sequence_parallel, "sequence parallelism"),
    }
    return {field: what for field, (is_asked, what) in asked.items() if is_asked}

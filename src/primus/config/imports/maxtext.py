"""Read a configuration of MaxText as an experiment.

Names and defaults are those of `maxtext/configs/base.yml` of MaxText 0.2.5 and of the files in `configs/models/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus.config.frameworks.known_keys import KnownKey, read_maxtext_keys
from primus.config.imports.foreign_config import NUMBER, ForeignConfig, check_types
from primus.errors import did_you_mean, find_nearest

MODELS = {
    "llama2-7b": "llama2_7B",
    "llama2-13b": "llama2_13B",
    "llama2-70b": "llama2_70B",
    "llama3-8b": "llama3_8B",
    "llama3-70b": "llama3_70B",
    "llama3.1-8b": "llama3.1_8B",
    "llama3.1-70b": "llama3.1_70B",
    "llama3.1-405b": "llama3.1_405B",
    "llama3.3-70b": "llama3.3_70B",
    "deepseek2-16b": "deepseek_v2_lite",
    "deepseek2-236b": "deepseek_v2",
    "deepseek3-671b": "deepseek_v3",
    "mixtral-8x7b": "mixtral_8x7B_v0.1",
    "mixtral-8x22b": "mixtral_8x22B_v0.1",
    "qwen2.5-1.5b": "qwen2.5_1.5B",
    "qwen2.5-7b": "qwen2.5_7B",
    "qwen2.5-14b": "qwen2.5_14B",
    "qwen3-0.6b": "qwen3_0.6B",
    "qwen3-4b": "qwen3_4B",
    "qwen3-8b": "qwen3_8B",
    "qwen3-14b": "qwen3_14B",
    "qwen3-32b": "qwen3_32B",
    "qwen3-30b-a3b": "qwen3_30B_A3B",
    "qwen3-235b-a22b": "qwen3_235B_A22B",
    "gpt-oss-20b": "gpt_oss_20B",
    "gpt-oss-120b": "gpt_oss_120B",
    "gemma4-26b": "gemma4_26B",
    "gemma4-31b": "gemma4_31B",
}
"""Model preset of each `model_name`."""

RENAMED = {
    "base_emb_dim": "hidden_size",
    "base_num_query_heads": "num_attention_heads",
    "base_num_kv_heads": "num_query_groups",
    "base_mlp_dim": "ffn_hidden_size",
    "base_num_decoder_layers": "num_layers",
    "base_moe_mlp_dim": "moe_ffn_hidden_size",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "normalization_layer_epsilon": "norm_epsilon",
    "rope_max_timescale": "rotary_base",
    "rope_factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "attention_bias": "add_qkv_bias",
    "use_qk_norm": "qk_layernorm",
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "first_num_dense_layers": "first_k_dense_replace",
    "load_balance_loss_weight": "moe_aux_loss_coeff",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "norm_topk_prob": "moe_router_norm_topk_prob",
    "routed_bias": "moe_router_enable_expert_bias",
    "n_routing_groups": "moe_router_num_groups",
    "topk_routing_group": "moe_router_group_topk",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
    "mtp_num_layers": "mtp_num_layers",
    "sliding_window_size": "window_size",
    "final_logits_soft_cap": "final_logit_softcapping",
    "max_target_length": "seq_length",
    "per_device_batch_size": "micro_batch_size",
    "steps": "train_iters",
    "learning_rate": "lr",
    "learning_rate_final_fraction": "min_lr_ratio",
    "learning_rate_schedule_steps": "lr_decay_iters",
    "warmup_steps_fraction": "lr_warmup_fraction",
    "adam_b1": "adam_beta1",
    "adam_b2": "adam_beta2",
    "adam_eps": "adam_eps",
    "adam_weight_decay": "weight_decay",
    "gradient_clipping_threshold": "clip_grad",
    "ici_tensor_parallelism": "tensor_model_parallel_size",
    "ici_pipeline_parallelism": "pipeline_model_parallel_size",
    "ici_context_parallelism": "context_parallel_size",
    "ici_expert_parallelism": "expert_model_parallel_size",
    "log_period": "log_interval",
    "eval_interval": "eval_interval",
    "eval_steps": "eval_iters",
    "base_output_directory": "workspace",
    "run_name": "exp_name",
    "tokenizer_path": "tokenizer_model",
    "async_checkpointing": "async_save",
    "data_shuffle_seed": "seed",
    "load_parameters_path": "load",
}
"""Settings that mean the same here under another name."""

NUMBERS = dict.fromkeys(("gradient_accumulation_steps", "shared_experts", "checkpoint_period"), NUMBER)
"""Further numbers."""

DEFAULTS: dict[str, Any] = {
    "train_iters": 150_001,
    "micro_batch_size": 12,
    "seq_length": 2048,
    "lr": 3e-5,
    "min_lr_ratio": 0.1,
    "lr_warmup_fraction": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "lr_decay_style": "cosine",
    "log_interval": 100,
}
"""What MaxText does without the setting (base.yml)."""

SHAPE_DEFAULTS: dict[str, Any] = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 7168,
    "num_attention_heads": 16,
    "num_query_groups": 16,
    "vocab_size": 32_000,
}
"""The shape of MaxText's model `default` (base.yml)."""
HEAD_WIDTH = 128
"""Of a model whose file does not state it, whatever its other sizes are (base.yml)."""
BASE = "base.yml"

ROPE_TYPES = {"default": "default", "llama3.1": "llama3", "yarn": "yarn"}
UNSET = {
    "sliding_window_size": 0,
    "head_dim": 0,
    "eval_interval": -1,
    "eval_steps": -1,
    "learning_rate_schedule_steps": -1,
    "n_routing_groups": -1,
    "topk_routing_group": -1,
    "num_experts": 1,
    "final_logits_soft_cap": 0.0,
    "base_moe_mlp_dim": -1,
    "load_parameters_path": "",
    "run_name": "",
    "base_output_directory": "",
    "tokenizer_path": "",
    "routed_scaling_factor": 0.0,
}
"""Value by which MaxText says that a setting is not set."""
_TELLING = (*RENAMED, "model_name", "dcn_data_parallelism", "ici_fsdp_parallelism", "remat_policy", "dataset_type")
FEWEST_TELLING = 3
KEPT_EFFECTS = ("numbers", "speed")
"""What a setting changes that the engine takes; primus does what those of reports, files and processes do."""


def is_maxtext(values: dict[str, Any]) -> bool:
    """Whether a YAML file is a configuration of MaxText."""
    return "base_config" in values or sum(key in values for key in _TELLING) >= FEWEST_TELLING


def read_maxtext(values: dict[str, Any], origin: str, name: str) -> ForeignConfig:
    """The experiment of a MaxText configuration."""
    target = ForeignConfig(origin=f"MaxText configuration {origin}", name=name, framework="maxtext")
    check_types(values, RENAMED | NUMBERS, origin)
    rest = {key: value for key, value in values.items() if value is not None}
    base = str(rest.pop("base_config", BASE))
    if base.rpartition("/")[2] != BASE:
        target.add_other("base_config", base, "its settings are not read: write them into the file that is imported")
    for key, value in DEFAULTS.items():
        target.set_key(key, value)
    if "model_name" not in rest or rest["model_name"] == "default":
        _set_default_shape(rest, target)
    _read_model(rest, target)
    _read_training(rest, target)
    known = read_maxtext_keys().keys
    for key, value in rest.items():
        _translate_value(key, value, target, known)
    return target


def _set_default_shape(rest: Mapping[str, Any], target: ForeignConfig) -> None:
    """Sizes that MaxText takes where the file has none."""
    for key, value in SHAPE_DEFAULTS.items():
        target.set_key(key, value)
    if rest.get("attention_type") != "mla":
        target.set_key("kv_channels", HEAD_WIDTH)


def _read_model(rest: dict[str, Any], target: ForeignConfig) -> None:
    model = rest.pop("model_name", "default")
    preset = MODELS.get(str(model))
    if preset:
        target.settings |= {"model": preset, "model_name": model}
    elif model != "default":
        close = find_nearest(str(model), MODELS)
        target.add_other("model_name", model, f"no preset has this name{f'; did you mean {close}?' if close else ''}")
    tied = rest.pop("logits_via_embedding", None)
    if tied is not None or not preset:
        target.set_key("untie_embeddings_and_output_weights", not tied)
    rope = rest.pop("rope_type", None)
    if isinstance(rope, str) and rope in ROPE_TYPES:
        target.set_key("rope_type", ROPE_TYPES[rope])
    elif rope is not None:
        target.add_other("rope_type", rope, "primus scales rope by llama3 or yarn")
    if rest.pop("attention_type", "global") == "mla":
        target.set_key("multi_latent_attention", True)
    shared = rest.pop("shared_experts", 0)
    width = rest.get("base_moe_mlp_dim", -1)
    if shared and width > 0:
        target.set_key("moe_shared_expert_intermediate_size", shared * width)
    function = rest.pop("routed_score_func", "")
    if function:
        target.set_key("moe_router_score_function", function)
    if rest.get("q_lora_rank") == 0:
        rest.pop("q_lora_rank")


def _read_training(rest: dict[str, Any], target: ForeignConfig) -> None:
    accumulation = rest.pop("gradient_accumulation_steps", 1)
    batch = rest.get("per_device_batch_size", DEFAULTS["micro_batch_size"])
    if batch < 1:
        rest.pop("per_device_batch_size")
        target.set_key("micro_batch_size", 1)
        target.add_other(
            "per_device_batch_size", batch, "less than a sequence for each device; set context_parallel_size"
        )
    if accumulation != 1:
        reason = f"set global_batch_size to micro_batch_size x devices x {accumulation}"
        target.add_other("gradient_accumulation_steps", accumulation, reason)
    target.set_key("bf16", rest.pop("dtype", "bfloat16") == "bfloat16")
    kind = rest.pop("dataset_type", "tfds")
    files = rest.pop("grain_train_files", None)
    if kind == "grain" and rest.pop("grain_file_type", "") in ("mmap", "mmap_npy") and files:
        target.set_key("train_data_path", files)
    elif kind == "synthetic":
        target.set_key("mock_data", True)
    else:
        data = {
            "dataset_type": kind,
            "dataset_name": rest.pop("dataset_name", None),
            "hf_path": rest.pop("hf_path", None),
        }
        shown = ", ".join(f"{key} {value}" for key, value in data.items() if value)
        target.add_other("dataset", shown, "prepare it by `data prepare` and set train_data_path")
    if rest.pop("enable_checkpointing", True):
        target.set_key("save_interval", rest.pop("checkpoint_period", 10_000))
        target.set_key("auto_continue_train", True)
    else:
        rest.pop("checkpoint_period", None)
        target.set_key("disable_last_saving", True)
    target.set_key("recompute_activations", rest.get("remat_policy", "full") == "full")


def _translate_value(key: str, value: Any, target: ForeignConfig, known: Mapping[str, KnownKey]) -> None:
    ours = RENAMED.get(key)
    if ours and UNSET.get(key, _MISSING) == value:
        return
    if ours in ("exp_name", "workspace"):
        target.settings[ours] = value
    elif ours:
        target.set_key(ours, value)
    elif key not in known:
        target.add_other(key, value, f"MaxText has no such setting; {did_you_mean(key, [*RENAMED, *known])}")
    elif known[key].gone or known[key].effect not in KEPT_EFFECTS:
        target.add_other(key, value)
    elif value != known[key].default:
        target.settings[key] = value


_MISSING = object()

"""Models of MaxText, and settings that mean the same here under another name.

Source: `maxtext/configs/base.yml` of MaxText 0.2.5 and the files in `configs/models/`.
"""

from __future__ import annotations

from pathlib import Path

from primus.config.translation.known_keys import KnownKeys, read_known_keys
from primus.engine_keys import list_file_names

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
    "kimi-k2-1t": "kimi_k2",
    "llama4-17b-16e": "llama4_17B16E",
    "llama4-17b-128e": "llama4_17B128E",
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

FOLDER = Path(__file__).parent
RENAMED = list_file_names(FOLDER)
"""Key of the schema by the setting with the same meaning."""

DEFAULTS = (
    *("steps", "per_device_batch_size", "max_target_length", "learning_rate", "learning_rate_final_fraction"),
    *("warmup_steps_fraction", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay", "gradient_clipping_threshold"),
    "log_period",
)
"""Settings that mean MaxText's default where they are not set, because primus may do otherwise."""
OLDER = {"save_period": "checkpoint_period", "rms_norm_epsilon": "normalization_layer_epsilon"}
"""Name of a setting in base.yml by its name in MaxText of 2023."""
OLDER_WITHOUT_EFFECT = ("enable_profiler",)
"""Settings of MaxText of 2023 that change only reports."""
SHAPE = (
    *("base_num_decoder_layers", "base_emb_dim", "base_mlp_dim", "base_num_query_heads", "base_num_kv_heads"),
    "vocab_size",
)
"""Sizes of MaxText's model `default`, which a file without the name of a model may leave out."""
HEAD_WIDTH = 128
"""Of a model whose file does not state it, whatever its other sizes are."""
UNDECAYED = (".*norm.*", ".*bias.*")
"""Parameters without weight decay (`adamw_mask`), as in native: all but matrices."""
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Keys that base.yml states for every model, and only latent attention (`attention_type: mla`) uses."""
EXPERTS = (
    *("moe_router_topk", "moe_ffn_hidden_size", "first_k_dense_replace", "moe_aux_loss_coeff"),
    *("moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_norm_topk_prob"),
    *("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk", "shared_experts"),
)
"""Keys that base.yml states for every model, and only one with experts uses."""
SCALING = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
"""Keys that base.yml states for every model, and only scaled rope uses."""
OBJECTIVES = {
    "use_sft": "fine-tuning on instructions is another task",
    "use_dpo": "preference optimization is not done here",
    "use_multimodal": "only text is trained",
}
"""Why a switch that chooses another objective than pre-training is refused."""
ROPE_TYPES = {"default": "default", "llama3.1": "llama3", "yarn": "yarn"}
UNSET = {
    "sliding_window_size": 0,
    "head_dim": 0,
    "q_lora_rank": 0,
    "kv_lora_rank": 0,
    "o_lora_rank": 0,
    "o_groups": 0,
    "eval_interval": -1,
    "eval_steps": -1,
    "learning_rate_schedule_steps": -1,
    "n_routing_groups": -1,
    "topk_routing_group": -1,
    "num_experts": 1,
    "final_logits_soft_cap": 0.0,
    "base_moe_mlp_dim": -1,
    "tokenizer_path": "",
    "routed_scaling_factor": 0.0,
    "routed_score_func": "",
}
"""Value by which MaxText says that a setting is not set."""


def read_settings() -> KnownKeys:
    """The settings of MaxText's base.yml, and those of Primus' files that it does not have."""
    return read_known_keys(Path(__file__).with_name("known_keys.json"))

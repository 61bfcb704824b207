"""Small models of every family with weight names, and random weights for them."""

from __future__ import annotations

from typing import Any

import torch

from primus.checkpoint.family import list_hub_shapes
from primus.config.schema import ModelSpec

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab_size": 50,
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied llama": {"untie_embeddings_and_output_weights": False},
    "qwen2.5": {"add_qkv_bias": True, "kv_channels": 4},
    "qwen3": {"qk_layernorm": True, "untie_embeddings_and_output_weights": False},
}
MOE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 12}
LATENT: dict[str, Any] = {
    **MOE,
    "multi_latent_attention": True,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "moe_shared_expert_intermediate_size": 24,
}
SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 4, "ffn_hidden_size": 40, "moe_router_pre_softmax": False},
    "qwen3_moe": {**MOE, "qk_layernorm": True, "moe_router_norm_topk_prob": True},
    "deepseek_moe": {**MOE, "moe_shared_expert_intermediate_size": 24, "first_k_dense_replace": 1},
    "glm4_moe": {**MOE, "moe_shared_expert_intermediate_size": 24, "moe_router_enable_expert_bias": True}
    | {"qk_layernorm": True, "add_qkv_bias": True, "moe_router_score_function": "sigmoid"},
    "deepseek_v2 lite": LATENT,
    "deepseek_v3": {**LATENT, "q_lora_rank": 14, "moe_router_enable_expert_bias": True, "mtp_num_layers": 1}
    | {"moe_router_score_function": "sigmoid", "moe_router_norm_topk_prob": True},
    "gpt_oss": {
        "num_experts": 4,
        "ffn_hidden_size": 40,
        "moe_router_pre_softmax": False,
        "attention_sinks": True,
        "add_qkv_bias": True,
        "add_bias_linear": True,
    },
}
_NATIVE_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_moe", "glm4_moe", "deepseek_v2 lite", "deepseek_v3", "gpt_oss")
NATIVE = {**DENSE, **{name: SPARSE[name] for name in _NATIVE_EXPERTS}}
"""Those that native trains."""


def make_spec(**changes: Any) -> ModelSpec:
    """The small model with `changes`."""
    return ModelSpec(**{**SHAPE, **changes})


def draw_hub_tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in list_hub_shapes(spec).items()}

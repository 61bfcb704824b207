"""Families of Hugging Face models: what the `config.json` of each says of its layers, and its defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primus.config.imports.hugging_face_file import HuggingFaceFile

LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Keys of latent attention (DeepSeek)."""
MIXTRAL_EXPERTS = {
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
}
QWEN_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "norm_topk_prob": "moe_router_norm_topk_prob",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
    "decoder_sparse_step": "moe_layer_freq",
}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "first_k_dense_replace": "first_k_dense_replace",
    "aux_loss_alpha": "moe_aux_loss_coeff",
}
"""Keys of experts, by families that share their names."""


def _read_llama(file: HuggingFaceFile) -> None:
    if file.take("attention_bias", False):
        file.set_keys(add_qkv_bias=True)
        file.report("attention_bias", "taken for query, key and value; the bias on the attention's output is not")
    if file.take("mlp_bias", False):
        file.report("mlp_bias", "primus has no bias on the feed-forward alone")


def _read_mistral(file: HuggingFaceFile) -> None:
    window = file.take("sliding_window")
    if window is not None:
        file.set_keys(window_size=window)


def _read_qwen2(file: HuggingFaceFile) -> None:
    file.set_keys(add_qkv_bias=True)
    _read_optional_window(file)


def _read_qwen3(file: HuggingFaceFile) -> None:
    file.set_keys(qk_layernorm=True)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of a model with query and key norms")
    _read_optional_window(file)


def _read_optional_window(file: HuggingFaceFile) -> None:
    """Qwen's window, which `use_sliding_window` enables for the layers from `max_window_layers` on."""
    is_used = file.take("use_sliding_window", False)
    window = file.take("sliding_window")
    layers = file.take("max_window_layers")
    kinds = file.take("layer_types")
    if is_used and window and (kinds is None or "sliding_attention" in kinds):
        file.target.add_other("sliding_window", window, f"a window from layer {layers} on has no key of primus")


def _read_mixtral(file: HuggingFaceFile) -> None:
    file.copy_keys(MIXTRAL_EXPERTS)
    file.set_keys(moe_router_pre_softmax=False)
    _read_mistral(file)
    if file.take("router_jitter_noise", 0.0):
        file.report("router_jitter_noise", "primus adds no noise to the router")


def _read_qwen3_moe(file: HuggingFaceFile) -> None:
    _read_qwen3(file)
    _read_experts(file)


def _read_qwen2_moe(file: HuggingFaceFile) -> None:
    _read_qwen2(file)
    _read_experts(file)
    file.copy_keys({"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"})
    file.set_keys(moe_shared_expert_gate=True)


def _read_experts(file: HuggingFaceFile) -> None:
    """Experts of the Qwen families, which every layer has unless the file names layers without."""
    # transformers 5 writes num_local_experts for what published files call num_experts
    file.copy_keys({"num_local_experts": "num_experts"} | QWEN_EXPERTS)
    dense = sorted(file.take("mlp_only_layers", []))
    if dense == list(range(len(dense))):
        file.set_keys(first_k_dense_replace=len(dense))
    else:
        file.report("mlp_only_layers", "primus has dense layers only at the start (first_k_dense_replace)")


def _read_deepseek_v2(file: HuggingFaceFile) -> None:
    _read_latent_attention(file)
    groups, limited = file.take("n_group"), file.take("topk_group")
    if file.take("topk_method", "greedy") == "group_limited_greedy" and groups:
        file.set_keys(moe_router_num_groups=groups, moe_router_group_topk=limited)
    if file.take("scoring_func", "softmax") != "softmax":
        file.report("scoring_func", "DeepSeek-V2 scores by softmax")
    # DeepSeek-V2 reads norm_topk_prob, but transformers does not apply it in this family; false in published files.
    file.set_keys(moe_router_norm_topk_prob=bool(file.take("norm_topk_prob", False)))


def _read_deepseek_v3(file: HuggingFaceFile) -> None:
    _read_latent_attention(file)
    file.copy_keys({"n_group": "moe_router_num_groups", "topk_group": "moe_router_group_topk"})
    file.set_keys(
        moe_router_score_function=file.take("scoring_func", "sigmoid"),
        moe_router_enable_expert_bias=file.take("topk_method", "noaux_tc") == "noaux_tc",
        moe_router_norm_topk_prob=bool(file.take("norm_topk_prob", True)),
    )
    # The multi-token prediction layers of published files; transformers itself does not build them.
    file.copy_keys({"num_nextn_predict_layers": "mtp_num_layers"})


def _read_latent_attention(file: HuggingFaceFile) -> None:
    """Attention and experts that DeepSeek V2 and V3 share."""
    file.copy_keys(LATENT)
    file.set_keys(multi_latent_attention=True)
    file.take("qk_head_dim")  # the sum of two keys
    for key in ("num_query_groups", "kv_channels"):  # both follow from the latent sizes
        file.target.model.pop(key, None)
    if file.take("n_routed_experts"):
        width = file.take("moe_intermediate_size", 0)
        file.copy_keys(DEEPSEEK_EXPERTS)
        if file.take("moe_layer_freq", 1) != 1:
            file.report("moe_layer_freq", "primus has experts in every layer after the dense ones (DeepSeek)")
        shared = file.take("n_shared_experts", 0)
        if shared:
            file.set_keys(moe_shared_expert_intermediate_size=shared * width)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias in latent attention")


GPT_OSS_ALPHA = 1.702
"""Of its activation (openai/gpt-oss, gpt_oss/torch/model.py, swiglu)."""


def _read_gpt_oss(file: HuggingFaceFile) -> None:
    file.copy_keys(
        {"num_local_experts": "num_experts", "num_experts_per_tok": "moe_router_topk", "sliding_window": "window_size"}
    )
    kinds = file.take("layer_types") or ["sliding_attention", "full_attention"]
    period = _find_window_period(kinds)
    if period is None:
        file.report("layer_types", "primus has a window on every n-th layer, starting with the first")
    if not file.take("attention_bias", True):
        file.report("attention_bias", "gpt-oss has a bias on every projection")
    if file.take("swiglu_alpha", GPT_OSS_ALPHA) != GPT_OSS_ALPHA:
        file.report("swiglu_alpha", f"gpt-oss has {GPT_OSS_ALPHA}")
    file.set_keys(
        window_layer_period=period or 1,
        add_qkv_bias=True,
        add_bias_linear=True,
        attention_sinks=True,
        activation_clamp=file.take("swiglu_limit", 7.0),
        moe_router_pre_softmax=False,
    )
    if file.take("router_aux_loss_coef"):
        file.report("router_aux_loss_coef", "set moe_aux_loss_coeff; transformers adds it with output_router_logits")


def _find_window_period(kinds: list[str]) -> int | None:
    """Distance between layers with a window, the first of which is layer 0; None if they are placed otherwise."""
    layers = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    for period in range(1, len(kinds) + 1):
        if layers == list(range(0, len(kinds), period)):
            return period
    return None


def _read_gemma(file: HuggingFaceFile) -> None:
    file.target.add_other(
        "model_type",
        file.values["model_type"],
        "embeddings scaled by sqrt(hidden_size) and norms of 1 + weight have no key; the backend must know the family",
    )
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of this family")


def _read_gemma2(file: HuggingFaceFile) -> None:
    _read_gemma(file)
    file.copy_keys({"final_logit_softcapping": "final_logit_softcapping", "sliding_window": "window_size"})
    file.set_keys(post_layernorm=True)
    _read_layer_kinds(file, default=2)
    for key in ("attn_logit_softcapping", "query_pre_attn_scalar"):
        if file.take(key) is not None:
            file.report(key, "no key of primus")


def _read_gemma3(file: HuggingFaceFile) -> None:
    _read_gemma2(file)
    file.set_keys(qk_layernorm=True)
    local = file.take("rope_local_base_freq")
    if local is not None:
        file.report("rope_local_base_freq", "primus has one rope for all layers")


def _read_layer_kinds(file: HuggingFaceFile, default: int) -> None:
    """Layers with a window and with full attention, as a pattern that is repeated (Gemma 2 and 3)."""
    kinds = file.take("layer_types")
    every = file.take("sliding_window_pattern") or file.take("_sliding_window_pattern") or default
    file.unread -= {"sliding_window_pattern", "_sliding_window_pattern"}
    if kinds:
        text = "".join("W" if kind == "sliding_attention" else "*" for kind in kinds)
        file.set_keys(hybrid_layer_pattern=_shorten_pattern(text))
    else:
        file.set_keys(hybrid_layer_pattern="W" * (every - 1) + "*")


def _shorten_pattern(text: str) -> str:
    """The shortest pattern whose repetition gives `text`."""
    for length in range(1, len(text) + 1):
        if (text[:length] * len(text))[: len(text)] == text:
            return text[:length]
    return text


DEFAULTS: dict[str, Any] = {
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Values that most families take for keys that a file leaves out."""
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 8192}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen2_moe": {"num_key_value_heads": 16, "max_position_embeddings": 32768, "router_aux_loss_coef": 0.001},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v2": {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128},
    "deepseek_v3": {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "max_position_embeddings": 4096, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    "gpt_oss": {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000.0, "head_dim": 64}
    | {"num_key_value_heads": 8, "sliding_window": 128, "num_experts_per_tok": 4},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"num_key_value_heads": 4, "sliding_window": 4096, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA
    | {"num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 131072, "rope_theta": 1e6},
}
"""Values that a family takes for keys that a file leaves out, where they differ from DEFAULTS."""
FAMILIES: dict[str, Callable[[HuggingFaceFile], None]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "mixtral": _read_mixtral,
    "qwen2": _read_qwen2,
    "qwen2_moe": _read_qwen2_moe,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "deepseek_v2": _read_deepseek_v2,
    "deepseek_v3": _read_deepseek_v3,
    "gpt_oss": _read_gpt_oss,
    "gemma": _read_gemma,
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3,
}
"""Reader of each `model_type`."""

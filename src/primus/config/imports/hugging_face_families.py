"""Families of Hugging Face models: what the `config.json` of each says of its layers, and its defaults."""

from __future__ import annotations

from primus.config.imports.hugging_face_file import HuggingFaceFile

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
"""Keys of experts, by families that share their names."""


def read_llama(file: HuggingFaceFile) -> None:
    if file.take("attention_bias", False):
        file.set_keys(add_qkv_bias=True)
        file.report("attention_bias", "taken for query, key and value; the bias on the attention's output is not")
    if file.take("mlp_bias", False):
        file.report("mlp_bias", "primus has no bias on the feed-forward alone")


def read_seed_oss(file: HuggingFaceFile) -> None:
    file.set_keys(add_qkv_bias=file.take("attention_bias", True))
    for key in ("attention_out_bias", "mlp_bias"):
        if file.take(key, False):
            file.report(key, "primus has no bias on one of these projections alone")


def read_phi3(file: HuggingFaceFile) -> None:
    file.take("original_max_position_embeddings")  # of the scaling, which is reported
    file.set_keys(packed_projections=True)
    read_mistral(file)


def read_mistral(file: HuggingFaceFile) -> None:
    window = file.take("sliding_window")
    if window is not None:
        file.set_keys(window_size=window)


def read_olmo2(file: HuggingFaceFile) -> None:
    """OLMo 2: norms after attention and feed-forward, and over all heads of queries and keys."""
    file.set_keys(pre_layernorm=False, post_layernorm=True, qk_layernorm=True, qk_layernorm_across_heads=True)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of this family")


def read_qwen2(file: HuggingFaceFile) -> None:
    file.set_keys(add_qkv_bias=True)
    read_optional_window(file)


def read_qwen3(file: HuggingFaceFile) -> None:
    file.set_keys(qk_layernorm=True)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of a model with query and key norms")
    read_optional_window(file)


def read_optional_window(file: HuggingFaceFile) -> None:
    """Qwen's window, which `use_sliding_window` enables for the layers from `max_window_layers` on."""
    is_used = file.take("use_sliding_window", False)
    window = file.take("sliding_window")
    layers = file.take("max_window_layers")
    kinds = file.take("layer_types")
    if is_used and window and (kinds is None or "sliding_attention" in kinds):
        file.target.add_other("sliding_window", window, f"a window from layer {layers} on has no key of primus")


def read_smollm3(file: HuggingFaceFile) -> None:
    read_llama(file)
    read_rope_layers(file)
    if file.take("use_sliding_window", False):
        file.report("use_sliding_window", "a window on the layers without rope has no key of primus")


def read_rope_layers(file: HuggingFaceFile) -> None:
    """Every n-th layer without rope (SmolLM3, Llama 4): a list of 1 and 0, or an interval."""
    num_layers, every = file.take("num_hidden_layers"), file.take("no_rope_layer_interval")
    layers = file.take("no_rope_layers") or [int((index + 1) % every != 0) for index in range(num_layers)]
    bare = [index + 1 for index, has_rope in enumerate(layers[:num_layers]) if not has_rope]
    if bare == list(range(bare[0], num_layers + 1, bare[0])) if bare else True:
        file.set_keys(no_rope_freq=bare[0] if bare else None)
    else:
        file.report("no_rope_layers", "primus leaves rope out of every n-th layer (no_rope_freq)")


def read_minimax(file: HuggingFaceFile) -> None:
    """MiniMax-M2: a norm over all heads together, and experts scored as those of DeepSeek-V3."""
    file.copy_keys(MIXTRAL_EXPERTS)
    width = file.take("rotary_dim")
    if width:
        file.set_keys(rotary_percent=width / file.target.model["kv_channels"])
    if file.take("scoring_func", "sigmoid") != "sigmoid" or not file.take("use_routing_bias", True):
        file.report("scoring_func", "transformers scores by a sigmoid and balances by biases in this family")
    for key in ("use_qk_norm", "qk_norm_type", "use_mtp", "mtp_transformer_layers", "shared_intermediate_size"):
        file.take(key)  # transformers builds what these say, or does not read them
    if file.take("num_mtp_modules", 0):
        file.report("num_mtp_modules", "the layers of multi-token prediction are not built, as in transformers")
    file.set_keys(
        qk_layernorm=True,
        qk_layernorm_across_heads=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_norm_topk_prob=True,
    )


def read_mixtral(file: HuggingFaceFile) -> None:
    file.copy_keys(MIXTRAL_EXPERTS)
    file.set_keys(moe_router_pre_softmax=False)
    read_mistral(file)
    if file.take("router_jitter_noise", 0.0):
        file.report("router_jitter_noise", "primus adds no noise to the router")


def read_qwen3_moe(file: HuggingFaceFile) -> None:
    read_qwen3(file)
    read_experts(file)


def read_qwen2_moe(file: HuggingFaceFile) -> None:
    read_qwen2(file)
    read_experts(file)
    file.copy_keys({"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"})
    file.set_keys(moe_shared_expert_gate=True)


def read_experts(file: HuggingFaceFile) -> None:
    """Experts of the Qwen families, which every layer has unless the file names layers without."""
    file.copy_keys(QWEN_EXPERTS)
    dense = sorted(file.take("mlp_only_layers", []))
    if dense == list(range(len(dense))):
        file.set_keys(first_k_dense_replace=len(dense))
    else:
        file.report("mlp_only_layers", "primus has dense layers only at the start (first_k_dense_replace)")


GPT_OSS_ALPHA = 1.702
"""Of its activation (openai/gpt-oss, gpt_oss/torch/model.py, swiglu)."""


def read_gpt_oss(file: HuggingFaceFile) -> None:
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

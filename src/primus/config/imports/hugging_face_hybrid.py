"""Families of Hugging Face models whose layers are of several kinds: Gemma, Llama 4, Qwen3.5, LFM2."""

from __future__ import annotations

from primus.config.imports.hugging_face_families import MIXTRAL_EXPERTS, read_experts, read_rope_layers
from primus.config.imports.hugging_face_file import HuggingFaceFile

LETTERS = {
    "full_attention": "*",
    "sliding_attention": "W",
    "linear_attention": "G",
    "conv": "C",
    "chunked_attention": "*",
}
"""Character of `hybrid_layer_pattern` by the name of a layer's kind in `layer_types`."""
LFM2_UNUSED = (
    *("block_dim", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init"),
    *("block_mlp_init_scale", "block_out_init_scale", "conv_dim", "conv_dim_out", "num_heads", "use_pos_enc"),
)
"""Keys of published files that the class of transformers does not read."""
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
"""Keys of gated delta nets."""


def read_gemma(file: HuggingFaceFile) -> None:
    file.set_keys(scale_embeddings=True, zero_centered_norms=True)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of this family")


def read_gemma2(file: HuggingFaceFile) -> None:
    _read_alternating_gemma(file, every=2)


def read_gemma3(file: HuggingFaceFile) -> None:
    _read_alternating_gemma(file, every=6)
    file.set_keys(qk_layernorm=True)
    _check_direction(file)
    local = file.take("rope_local_base_freq", 10000.0)
    if local != file.target.model["rotary_base"] and "window_rotary_base" not in file.target.model:
        file.set_keys(window_rotary_base=float(local))


def _read_alternating_gemma(file: HuggingFaceFile, every: int) -> None:
    """Gemma 2 and 3: layers with a window, and every n-th one with full attention."""
    read_gemma(file)
    file.copy_keys({"final_logit_softcapping": "final_logit_softcapping", "sliding_window": "window_size"})
    file.copy_keys({key: key for key in ("attn_logit_softcapping", "query_pre_attn_scalar")})
    file.set_keys(post_layernorm=True)
    _set_layer_kinds(file, ["sliding_attention"] * (_take_period(file, every) - 1) + ["full_attention"])


def read_gemma4(file: HuggingFaceFile) -> None:
    file.target.add_other(
        "model_type", "gemma4_text", "embeddings and queries have scales of their own; a framework must know them"
    )
    file.copy_keys({"final_logit_softcapping": "final_logit_softcapping", "sliding_window": "window_size"})
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of this family")
    is_shared = file.take("attention_k_eq_v", False)
    file.set_keys(
        post_layernorm=True,
        qk_layernorm=True,
        global_kv_channels=file.take("global_head_dim", 512),
        global_share_kv_projections=is_shared,
    )
    groups = file.take("num_global_key_value_heads")
    if groups and is_shared:
        file.set_keys(global_num_query_groups=groups)
    _set_layer_kinds(file, ["sliding_attention"] * 5 + ["full_attention"])
    _check_direction(file)
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input", "use_double_wide_mlp"):
        if file.take(key):
            file.report(key, "primus has no such layers: the model that is built differs")
    file.take("vocab_size_per_layer_input")
    if file.take("enable_moe_block", False):
        names = {"num_experts": "num_experts", "top_k_experts": "moe_router_topk"}
        file.copy_keys(names | {"moe_intermediate_size": "moe_ffn_hidden_size"})
        file.set_keys(moe_parallel_dense=True, moe_router_norm_topk_prob=True)
    else:
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            file.take(key)


def _check_direction(file: HuggingFaceFile) -> None:
    """Gemma's attention in both directions; of images alone it does not matter for text."""
    direction = file.take("use_bidirectional_attention", False)
    if direction and direction != "vision":
        file.report("use_bidirectional_attention", "primus has causal attention only")


def read_llama4(file: HuggingFaceFile) -> None:
    """Llama 4: experts every n-th layer, chunked attention, and layers without rope."""
    file.copy_keys(MIXTRAL_EXPERTS | {"attention_chunk_size": "attention_chunk_size"})
    width, every = file.take("moe_intermediate_size"), file.take("interleave_moe_layer_step")
    layers, num_layers = file.take("moe_layers"), file.take("num_hidden_layers")
    if layers is not None and layers != list(range(every - 1, num_layers, every)):
        file.report("moe_layers", "primus has experts in every n-th layer (moe_layer_freq)")
    file.set_keys(
        moe_layer_freq=every,
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width,
        moe_router_score_function="sigmoid",
        moe_apply_probs_on_input=True,
    )
    read_rope_layers(file)
    file.take("layer_types")  # chunks where there is rope
    if file.take("use_qk_norm", False):
        file.report("use_qk_norm", "primus does not normalize queries and keys without weights")
    if file.take("attn_temperature_tuning", False):
        file.report("attn_temperature_tuning", "primus does not scale the attention of late positions")
    for key in ("floor_scale", "attn_scale"):
        file.take(key)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of this family")


def read_qwen3_5(file: HuggingFaceFile) -> None:
    """Qwen3.5 and Qwen3-Next: gated delta nets, and every n-th layer with gated full attention."""
    file.copy_keys({key: key for key in LINEAR})
    _set_layer_kinds(file, ["linear_attention"] * (file.take("full_attention_interval", 4) - 1) + ["full_attention"])
    file.set_keys(qk_layernorm=True, attention_output_gate=True)
    file.target.model.setdefault("rotary_percent", 0.25)  # as the class of transformers
    if not file.take("attn_output_gate", True):
        file.report("attn_output_gate", "transformers has a gate on the attention's output in this family")
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias on all projections of a model with query and key norms")
    if file.take("mtp_num_hidden_layers", 0):
        file.report("mtp_num_hidden_layers", "the layers of multi-token prediction are not built, as in transformers")
    file.take("mtp_use_dedicated_embeddings"), file.take("mamba_ssm_dtype")
    if file.take("num_experts"):
        read_experts(file)
        file.copy_keys({"shared_expert_intermediate_size": "moe_shared_expert_intermediate_size"})
        file.set_keys(moe_shared_expert_gate=True, moe_router_norm_topk_prob=file.take("norm_topk_prob", True))
        file.target.model.setdefault("ffn_hidden_size", file.take("moe_intermediate_size"))  # of no layer
    else:
        file.take("mlp_only_layers")


def read_lfm2(file: HuggingFaceFile) -> None:
    """LFM2: short convolutions, and layers with attention among them."""
    whole = file.take("full_attn_idxs")
    num_layers = file.take("num_hidden_layers")
    default = ["full_attention" if whole is None or index in whole else "conv" for index in range(num_layers)]
    _set_layer_kinds(file, default)
    file.set_keys(qk_layernorm=True, linear_conv_kernel_dim=file.take("conv_L_cache"))
    for key in LFM2_UNUSED:
        file.take(key)
    if file.take("conv_bias", False):
        file.report("conv_bias", "primus has no bias on short convolutions")
    if file.take("block_auto_adjust_ff_dim", False):
        multiple, factor = file.take("block_multiple_of", 256), file.take("block_ffn_dim_multiplier", 1.0)
        width = int(factor * int(2 * file.take("intermediate_size") / 3))
        file.set_keys(ffn_hidden_size=-(-width // multiple) * multiple)
    if file.take("num_experts"):
        names = {"num_experts": "num_experts", "num_dense_layers": "first_k_dense_replace"}
        names |= {"num_experts_per_tok": "moe_router_topk", "moe_intermediate_size": "moe_ffn_hidden_size"}
        file.copy_keys(names | {"routed_scaling_factor": "moe_router_topk_scaling_factor"})
        file.set_keys(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=file.take("use_expert_bias", True),
            moe_router_norm_topk_prob=file.take("norm_topk_prob", True),
        )


def _take_period(file: HuggingFaceFile, default: int) -> int:
    """Distance between layers with full attention (Gemma 2 and 3)."""
    old, new = file.take("_sliding_window_pattern"), file.take("sliding_window_pattern")
    return int(new or old or default)


def _set_layer_kinds(file: HuggingFaceFile, default: list[str]) -> None:
    """The pattern of the layers' kinds; `default` is one period of it, for a file that does not name them."""
    kinds = file.take("layer_types") or default
    unknown = sorted(set(kinds) - LETTERS.keys())
    if unknown:
        file.report("layer_types", f"primus has no layers of kind {', '.join(unknown)}")
        return
    file.set_keys(hybrid_layer_pattern=_shorten_pattern("".join(LETTERS[kind] for kind in kinds)))


def _shorten_pattern(text: str) -> str:
    """The shortest pattern whose repetition gives `text`."""
    for length in range(1, len(text) + 1):
        if (text[:length] * len(text))[: len(text)] == text:
            return text[:length]
    return text

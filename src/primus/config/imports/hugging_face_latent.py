"""Families of Hugging Face models with latent attention: DeepSeek, Kimi, GLM."""

from __future__ import annotations

from primus.config.imports.hugging_face_file import HuggingFaceFile

LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Keys of latent attention (DeepSeek)."""
DEEPSEEK_EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "first_k_dense_replace": "first_k_dense_replace",
    "aux_loss_alpha": "moe_aux_loss_coeff",
}
"""Keys of their experts."""
INDEXER = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
"""Keys of sparse attention (DeepSeek-V3.2 and V4, GLM-5)."""
COMPRESSED = {
    "q_lora_rank": "q_lora_rank",
    "o_lora_rank": "o_lora_rank",
    "o_groups": "o_groups",
    "sliding_window": "window_size",
    "hc_mult": "num_residual_streams",
    "swiglu_limit": "activation_clamp",
    "router_aux_loss_coef": "moe_aux_loss_coeff",
}
"""Further keys of DeepSeek-V4."""
RATIOS = {0: "W", 4: "S", 128: "H"}
"""Character of `hybrid_layer_pattern` by the tokens that DeepSeek-V4 merges into one key."""
KINDS = {"sliding_attention": "W", "compressed_sparse_attention": "S", "heavily_compressed_attention": "H"}
"""The same by the names of transformers."""


def read_deepseek_v2(file: HuggingFaceFile) -> None:
    read_latent_attention(file)
    groups, limited = file.take("n_group"), file.take("topk_group")
    if file.take("topk_method", "greedy") == "group_limited_greedy" and groups:
        file.set_keys(moe_router_num_groups=groups, moe_router_group_topk=limited)
    if file.take("scoring_func", "softmax") != "softmax":
        file.report("scoring_func", "DeepSeek-V2 scores by softmax")
    # DeepSeek-V2 reads norm_topk_prob, but transformers does not apply it in this family; false in published files.
    file.set_keys(moe_router_norm_topk_prob=bool(file.take("norm_topk_prob", False)))


def read_deepseek_v3(file: HuggingFaceFile) -> None:
    read_latent_attention(file)
    read_scored_router(file)


def read_sparse_attention(file: HuggingFaceFile) -> None:
    """DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses."""
    read_deepseek_v3(file)
    file.copy_keys(INDEXER)
    kinds = set(file.take("indexer_types", []))
    if "shared" in kinds or file.take("index_topk_freq", 1) > 1 or file.take("index_topk_pattern"):
        file.report("indexer_types", "some layers use the keys that an earlier one chose; here each has its indexer")


def read_glm4_moe(file: HuggingFaceFile) -> None:
    """GLM-4.5 to 4.7: grouped-query attention with the experts of DeepSeek-V3."""
    read_experts_with_shared(file)
    read_scored_router(file)
    file.set_keys(qk_layernorm=file.take("use_qk_norm", False), add_qkv_bias=file.take("attention_bias", False))
    file.target.model.setdefault("rotary_percent", 0.5)  # as the class of transformers


def read_deepseek_v4(file: HuggingFaceFile) -> None:
    read_experts_with_shared(file)
    read_scored_router(file)
    file.copy_keys(INDEXER | COMPRESSED)
    file.target.model.setdefault("ffn_hidden_size", file.take("moe_intermediate_size"))  # of no layer
    ratios, kinds = file.take("compress_ratios"), file.take("layer_types")
    num_layers = file.take("num_hidden_layers")
    letters = [KINDS[kind] for kind in kinds] if kinds else [RATIOS[ratio] for ratio in ratios or ()]
    pattern = "".join(letters) or "HH" + "HS" * num_layers  # as transformers without either
    file.set_keys(hybrid_layer_pattern=pattern[:num_layers])
    head = file.take("head_dim")
    # files of transformers 5 state the share of a head that is rotated, published ones its width
    width = file.take("qk_rope_head_dim") or round(file.target.model.get("rotary_percent", 64 / head) * head)
    file.set_keys(
        attention_sinks=True,
        num_hash_layers=file.take("num_hash_layers", 3),
        qk_pos_emb_head_dim=width,
        rotary_percent=width / head,
        rope_type="default",
        rotary_scaling_factor=1.0,
    )
    file.take("hc_eps"), file.take("hc_sinkhorn_iters")  # constants of its hyper-connections
    for key in ("rope_scaling", "compress_rope_theta"):
        if file.take(key):
            file.report(key, "of the layers with compressed keys; primus has one rope, that of the others")


def read_scored_router(file: HuggingFaceFile) -> None:
    """A router that scores each expert by itself, with a bias that balances their load (DeepSeek-V3)."""
    groups, limited = file.take("n_group", 1), file.take("topk_group", 1)
    if groups > 1:
        file.set_keys(moe_router_num_groups=groups, moe_router_group_topk=limited)
    file.set_keys(
        moe_router_score_function=file.take("scoring_func", "sigmoid"),
        moe_router_enable_expert_bias=file.take("topk_method", "noaux_tc") == "noaux_tc",
        moe_router_norm_topk_prob=bool(file.take("norm_topk_prob", True)),
    )
    # The multi-token prediction layers of published files; transformers itself does not build them.
    file.copy_keys({"num_nextn_predict_layers": "mtp_num_layers"})


def read_latent_attention(file: HuggingFaceFile) -> None:
    """Attention and experts that DeepSeek V2 and V3 share."""
    file.copy_keys(LATENT)
    file.set_keys(multi_latent_attention=True)
    file.take("qk_head_dim")  # the sum of two keys
    for key in ("num_query_groups", "kv_channels"):  # both follow from the latent sizes
        file.target.model.pop(key, None)
    if file.take("n_routed_experts"):
        read_experts_with_shared(file)
    if file.take("attention_bias", False):
        file.report("attention_bias", "primus has no bias in latent attention")


def read_experts_with_shared(file: HuggingFaceFile) -> None:
    """Experts beside shared ones, in every layer after the dense ones."""
    width = file.take("moe_intermediate_size", 0)
    file.copy_keys(DEEPSEEK_EXPERTS)
    if file.take("moe_layer_freq", 1) != 1:
        file.report("moe_layer_freq", "primus has experts in every layer after the dense ones (DeepSeek)")
    shared = file.take("n_shared_experts", 0)
    if shared:
        file.set_keys(moe_shared_expert_intermediate_size=shared * width)

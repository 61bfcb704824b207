"""The group `model` of an experiment: the shape of a transformer; and what all groups are made of.

The annotations are not strings, as in `schema`, which is the module to import from.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
LARGEST = 1e12
"""Above it a number is a slip, and its products soon leave the range of fp32."""
PositiveFloat = Annotated[float, Meta(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=LARGEST)]
LearningRate = Annotated[float, Meta(gt=0, le=1e3)]
"""1 is common with optimizers that normalize their step; nothing trains with thousands."""
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]


class ConfigGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every configuration group: frozen, unknown fields forbidden."""


class ModelSpec(ConfigGroup, frozen=True, kw_only=True):
    """Shape of a decoder-only transformer; a model preset is one YAML file of these."""

    hf_name: str = ""
    """Name of the published model on the Hugging Face Hub; also names its tokenizer."""
    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Inner width of a dense SwiGLU feed-forward layer."""
    num_attention_heads: Positive
    """Query heads."""
    num_query_groups: Positive | None = None
    """Key/value heads (grouped-query attention); as many as query heads when null."""
    kv_channels: Positive | None = None
    """Width of one attention head; hidden_size / num_attention_heads when null."""
    vocab_size: Positive
    """Rows of the embedding; the tokenizer must not be larger."""
    max_position_embeddings: Positive = 4096
    """Maximum sequence length of the model, in tokens."""
    untie_embeddings_and_output_weights: bool = True
    """Separate input embedding and output head; false shares one matrix."""
    norm_epsilon: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    scale_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    init_method_std: PositiveFloat = 0.02
    """Standard deviation of the normal initialization."""
    add_qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2.5)."""
    add_bias_linear: bool = False
    """Bias on every projection, the router and the experts as well (gpt-oss)."""
    packed_projections: bool = False
    """Published weights have queries, keys and values in one matrix, and gate and up in one (Phi-3)."""
    qk_layernorm: bool = False
    """RMSNorm on queries and keys of each head (Qwen3)."""
    rotary_base: PositiveFloat = 10000.0
    """Theta of rotary position embedding."""
    window_rotary_base: PositiveFloat | None = None
    """Theta of the layers with a window, whose frequencies are not scaled (Gemma 3); rotary_base when null."""
    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    """How rotary frequencies are scaled for long contexts."""
    rotary_scaling_factor: PositiveFloat = 1.0
    """Scaling factor of linear, llama3 or yarn rope."""
    rope_low_freq_factor: PositiveFloat = 1.0
    """Llama 3 rope: wavelengths longer than original length / this are fully scaled."""
    rope_high_freq_factor: PositiveFloat = 4.0
    """Llama 3 rope: wavelengths shorter than original length / this are kept."""
    original_max_position_embeddings: Positive = 8192
    """Context length before rope scaling, in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Yarn: rotations above which a dimension is kept."""
    beta_slow: PositiveFloat = 1.0
    """Yarn: rotations below which a dimension is fully scaled."""
    mscale: NonNegativeFloat = 1.0
    """Yarn: attention scale of the rotated part."""
    mscale_all_dim: NonNegativeFloat = 0.0
    """Yarn: attention scale of all dimensions."""
    yarn_correction_range_round_to_int: bool = True
    """Yarn: round the bounds of the scaled dimensions outwards to whole numbers; gpt-oss does not."""
    window_size: Positive | None = None
    """Sliding attention window in tokens; full attention when null."""
    window_layer_period: Positive = 1
    """Every n-th layer, starting with the first, uses the sliding window."""
    hybrid_layer_pattern: Annotated[str, Meta(pattern=r"^[*WMGKCHS-]+$")] | None = None
    """Kinds of the layers, one character each, repeated to num_layers: `*` attention, `W` attention within window_size,
    `M` Mamba-2, `G` gated delta net, `K` Kimi delta attention, `C` short convolution, `S` and `H` DeepSeek-V4's sparse
    and heavily compressed attention, `-` feed-forward. With `-` in it, layers of other kinds have no feed-forward."""
    attention_sinks: bool = False
    """A learned sink logit for each head (gpt-oss)."""
    attention_output_gate: bool = False
    """A learned gate on the attention's output (Qwen3.5, Kimi K3)."""
    qk_layernorm_across_heads: bool = False
    """The norms of queries and keys run over all heads together (MiniMax); needs qk_layernorm."""
    global_kv_channels: Positive | None = None
    """Width of a head of the layers with full attention, where it differs from the windowed ones (Gemma 4)."""
    global_num_query_groups: Positive | None = None
    """Key/value heads of the layers with full attention, where they differ (Gemma 4)."""
    global_share_kv_projections: bool = False
    """Layers with full attention use their keys as values (Gemma 4)."""
    no_rope_freq: Positive | None = None
    """Every n-th layer has no rotary embedding (Llama 4); none when null."""
    attention_chunk_size: Positive | None = None
    """Layers with rotary embedding attend within chunks of this many tokens (Llama 4); none when null."""
    rotary_percent: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of a head's width that gets rotary embedding."""
    post_layernorm: bool = False
    """A norm after attention and feed-forward as well (Gemma, Grok)."""
    pre_layernorm: bool = True
    """A norm before attention and feed-forward; OLMo 2 has those after them only."""
    query_pre_attn_scalar: Positive | None = None
    """Queries are divided by its square root (Gemma); the width of a head when null."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Soft limit of the attention's scores (Gemma 2); none when null."""
    final_logit_softcapping: PositiveFloat | None = None
    """Soft limit of the logits (Gemma, Grok); none when null."""
    ffn_activation: Literal["silu", "gelu"] = "silu"
    """Activation of the gated feed-forward."""
    activation_clamp: PositiveFloat | None = None
    """Limit of the clamped SwiGLU (gpt-oss); none when null."""
    num_residual_streams: Positive = 1
    """Streams of the hyper-connections (DeepSeek-V4)."""
    attn_res_block_size: Positive | None = None
    """Layers between the states that attention residuals attend to (Kimi K3); plain residuals when null."""
    mamba_state_dim: Positive = 128
    """Mamba-2: width of the state."""
    mamba_head_dim: Positive = 64
    """Mamba-2: width of one head."""
    mamba_num_groups: Positive = 8
    """Mamba-2: groups of heads that share the state's projections."""
    mamba_expand: Positive = 2
    """Mamba-2: inner width as a multiple of hidden_size."""
    mamba_d_conv: Positive = 4
    """Mamba-2: width of the convolution."""
    linear_num_key_heads: Positive | None = None
    """Linear attention (`G`, `K`): query and key heads."""
    linear_num_value_heads: Positive | None = None
    """Linear attention: value heads."""
    linear_key_head_dim: Positive | None = None
    """Linear attention: width of a key head."""
    linear_value_head_dim: Positive | None = None
    """Linear attention: width of a value head."""
    linear_conv_kernel_dim: Positive = 4
    """Linear attention and short convolution: width of the convolution."""
    linear_full_rank_gate: bool = False
    """Kimi delta attention: the output gate is one projection, not two through a latent (Kimi K3)."""
    num_experts: Positive | None = None
    """Routed experts of a mixture-of-experts layer; a dense model when null."""
    moe_router_topk: Positive = 2
    """Experts that each token is sent to."""
    moe_ffn_hidden_size: Positive | None = None
    """Inner width of one expert; ffn_hidden_size when null."""
    moe_shared_expert_intermediate_size: Positive | None = None
    """Inner width of the shared experts together; none when null."""
    first_k_dense_replace: NonNegative = 0
    """First layers that stay dense in a mixture-of-experts model (DeepSeek)."""
    moe_layer_freq: Positive = 1
    """Every n-th layer has experts, starting with layer n (Llama 4 Maverick: 2)."""
    moe_shared_expert_gate: bool = False
    """A learned gate on the shared experts (Qwen3.5)."""
    moe_latent_size: Positive | None = None
    """Width that tokens are projected to for the routed experts (Kimi K3); hidden_size when null."""
    moe_parallel_dense: bool = False
    """A dense feed-forward of ffn_hidden_size parallel to the experts of each layer, with separate norms (Gemma 4)."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """How the router scores experts."""
    moe_router_pre_softmax: bool = True
    """Softmax over all experts before top-k; false applies it to the chosen ones."""
    moe_router_norm_topk_prob: bool = False
    """Renormalize the probabilities of the chosen experts."""
    moe_router_enable_expert_bias: bool = False
    """A learned bias for each expert that balances load without an auxiliary loss (DeepSeek-V3)."""
    num_hash_layers: NonNegative = 0
    """First layers with experts that choose them by the id of the token (DeepSeek-V4): no bias balances their load."""
    moe_router_num_groups: Positive | None = None
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: Positive | None = None
    """Groups that a token may be sent to."""
    moe_router_topk_scaling_factor: PositiveFloat = 1.0
    """Factor on the routed output."""
    moe_apply_probs_on_input: bool = False
    """The probability of an expert multiplies its input instead of its output (Llama 4); with one expert of a token."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss."""
    multi_latent_attention: bool = False
    """Multi-head latent attention (DeepSeek) instead of grouped-query attention."""
    q_lora_rank: Positive | None = None
    """Latent width of the queries; full projection when null."""
    kv_lora_rank: Positive | None = None
    """Latent width of keys and values."""
    qk_head_dim: Positive | None = None
    """Width of the part of a head without rotary embedding."""
    qk_pos_emb_head_dim: Positive | None = None
    """Width of the part of a head with rotary embedding."""
    v_head_dim: Positive | None = None
    """Width of a value head."""
    dsa_indexer_n_heads: Positive | None = None
    """Heads of the indexer of sparse attention (DeepSeek-V3.2 and V4, GLM-5); none when null."""
    dsa_indexer_head_dim: Positive | None = None
    """Width of an indexer's head."""
    dsa_indexer_topk: Positive | None = None
    """Keys that sparse attention keeps for each query."""
    o_lora_rank: Positive | None = None
    """Latent width of the attention's output in each group (DeepSeek-V4)."""
    o_groups: Positive = 1
    """Groups of heads with separate output latents (DeepSeek-V4)."""
    mtp_num_layers: NonNegative = 0
    """Multi-token-prediction layers (DeepSeek-V3); not counted as parameters of the main model."""

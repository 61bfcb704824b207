"""The kinds of layers that models are made of, with the parameters and multiply-adds of each.

Symbols in formulas: h hidden_size, n query heads, g key/value heads, d head width, s sequence length; r_q, r_kv and r_o
latent widths; H_k and H_v heads of linear attention, d_k and d_v their widths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from primus.config.schema import ModelSpec

MixerKind = Literal[
    "attention", "window", "mamba", "gated_delta_net", "kimi_delta", "short_conv", "compressed", "sparse", "none"
]

PATTERN_KINDS: dict[str, MixerKind] = {
    "*": "attention",
    "W": "window",
    "M": "mamba",
    "G": "gated_delta_net",
    "K": "kimi_delta",
    "C": "short_conv",
    "H": "compressed",
    "S": "sparse",
    "-": "none",
}
"""Characters of `hybrid_layer_pattern`; `*`, `M`, `G` and `-` as in Megatron-LM's hybrid_layer_pattern."""

COMPRESSION = {"compressed": 128, "sparse": 4}
"""Tokens that DeepSeek-V4 merges into one key (DeepSeek-V4 config.json, compress_ratios)."""


class LayerKind(Struct, frozen=True, kw_only=True):
    """Kind of one transformer layer."""

    mixer: MixerKind = "attention"
    """Kind of token mixer; `none` for a feed-forward alone."""
    feed_forward: bool = True
    """A dense feed-forward or experts follow."""
    moe: bool = False
    """Mixture of experts instead of a dense feed-forward."""
    window: int | None = None
    """Maximum tokens that a query sees; the whole sequence when None."""


class MixerSize(Struct, frozen=True):
    """Size of one mixer."""

    matrices: int
    """Weights that multiply a token."""
    vectors: int = 0
    """Biases, norms, sinks, decay rates."""
    state: float = 0.0
    """Multiply-adds of a token in the forward pass, without those of matrices and of attention over the sequence."""

    @property
    def parameters(self) -> int:
        """All parameters of the mixer."""
        return self.matrices + self.vectors


def list_layers(spec: ModelSpec) -> list[LayerKind]:
    """Kind of each layer, the first one first."""
    return [_make_layer(spec, index) for index in range(spec.num_layers)]


def _make_layer(spec: ModelSpec, index: int) -> LayerKind:
    pattern = spec.hybrid_layer_pattern
    mixer: MixerKind = PATTERN_KINDS[pattern[index % len(pattern)]] if pattern else "attention"
    # In Megatron-LM's hybrid models the feed-forward is a separate layer; a Mamba-2 layer never has one.
    feed_forward = mixer == "none" or not (mixer == "mamba" or "-" in (pattern or ""))
    moe = (
        feed_forward
        and spec.num_experts is not None
        and index >= spec.first_k_dense_replace
        and (index + 1) % spec.moe_layer_freq == 0
    )
    if pattern:
        window = spec.window_size if mixer in ("window", *COMPRESSION) else None
    else:
        window = spec.window_size if index % spec.window_layer_period == 0 else None
    return LayerKind(mixer=mixer, feed_forward=feed_forward, moe=moe, window=window)


def head_dim(spec: ModelSpec) -> int:
    """Width of one query head; with MLA of both its parts, d_nope + d_rope."""
    if spec.multi_latent_attention:
        return (spec.qk_head_dim or 0) + (spec.qk_pos_emb_head_dim or 0)
    return spec.kv_channels or spec.hidden_size // spec.num_attention_heads


def value_head_dim(spec: ModelSpec) -> int:
    """Width of one value head."""
    return (spec.v_head_dim or 0) if spec.multi_latent_attention else head_dim(spec)


def num_query_groups(spec: ModelSpec) -> int:
    """Key/value heads."""
    return spec.num_query_groups or spec.num_attention_heads


def mixer_size(spec: ModelSpec, kind: MixerKind) -> MixerSize:
    """Parameters and multiply-adds of one mixer of `kind`."""
    return _SIZES[kind](spec)


def keys_per_query(spec: ModelSpec, layer: LayerKind, seq_length: int, windows: bool) -> float:
    """Keys that a query sees on average over a sequence: s/2, fewer with a window if `windows`, none when recurrent.

    DeepSeek-V4 sees its window and s/2 divided by the compression; the sparse kind `dsa_indexer_topk` of these at most.
    """
    half = seq_length / 2
    if layer.mixer in COMPRESSION:
        compressed = half / COMPRESSION[layer.mixer]
        if layer.mixer == "sparse" and spec.dsa_indexer_topk:
            compressed = min(compressed, spec.dsa_indexer_topk)
        return _count_window_keys(layer.window, seq_length) + compressed
    if layer.mixer not in ("attention", "window"):
        return 0.0
    return _count_window_keys(layer.window, seq_length) if windows else half


def _count_window_keys(window: int | None, seq_length: int) -> float:
    if window is None or window >= seq_length:
        return seq_length / 2
    return window * (1 - (window - 1) / (2 * seq_length))


def attention_width(spec: ModelSpec, layer: LayerKind) -> int:
    """n (d_qk + d_v): multiply-adds of a layer's attention for each key that a query sees."""
    if layer.mixer == "attention" and spec.global_kv_channels:
        return spec.num_attention_heads * 2 * spec.global_kv_channels
    return spec.num_attention_heads * (head_dim(spec) + value_head_dim(spec))


def _size_attention(spec: ModelSpec) -> MixerSize:
    """Full attention; its width may differ from that of windowed layers (Gemma 4)."""
    if spec.multi_latent_attention:
        return _size_latent_attention(spec)
    width = spec.global_kv_channels or head_dim(spec)
    groups = spec.global_num_query_groups or num_query_groups(spec)
    return _size_grouped_attention(spec, width, groups, 1 if spec.global_share_kv_projections else 2)


def _size_window_attention(spec: ModelSpec) -> MixerSize:
    if spec.o_lora_rank:
        return _size_compressed_attention(spec, ratio=None)
    return _size_grouped_attention(spec, head_dim(spec), num_query_groups(spec), 2)


def _size_grouped_attention(spec: ModelSpec, d: int, g: int, num_kv_projections: int) -> MixerSize:
    """h (n + 2g) d + n d h; n d h more with an output gate (Qwen3-Next, Hugging Face `Qwen3NextAttention`)."""
    h, n = spec.hidden_size, spec.num_attention_heads
    gate = h * n * d if spec.attention_output_gate else 0
    matrices = h * (n + num_kv_projections * g) * d + n * d * h + gate
    qkv_bias = (n + 2 * g) * d if spec.add_qkv_bias or spec.add_bias_linear else 0
    output_bias = h if spec.add_bias_linear else 0
    norm_width = (n + g) * d if spec.qk_layernorm_across_heads else 2 * d
    norms = norm_width if spec.qk_layernorm else 0
    return MixerSize(matrices, qkv_bias + output_bias + norms + (n if spec.attention_sinks else 0))


def _size_latent_attention(spec: ModelSpec) -> MixerSize:
    """Multi-head latent attention, with the norms of its latents, which Megatron-LM counts among the matrices.

    q = r_q (h + 1 + n (d_nope + d_rope)), or h n (d_nope + d_rope) without a latent; kv = h (r_kv + d_rope) + r_kv
    (1 + n (d_nope + d_v)); o = n d_v h (DeepSeek-V2, arXiv:2405.04434, section 2.1). The indexer of sparse attention
    adds r_q H_i d_i + h (d_i + H_i) and a norm with bias (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).
    """
    h, n, d = spec.hidden_size, spec.num_attention_heads, head_dim(spec)
    d_nope, d_rope, d_v = spec.qk_head_dim or 0, spec.qk_pos_emb_head_dim or 0, value_head_dim(spec)
    r_q, r_kv = spec.q_lora_rank, spec.kv_lora_rank or 0
    query = r_q * (h + 1 + n * d) if r_q else h * n * d
    key_value = h * (r_kv + d_rope) + r_kv * (1 + n * (d_nope + d_v))
    gate = h * n * d_v if spec.attention_output_gate else 0
    indexer = indexer_norm = 0
    if spec.dsa_indexer_n_heads and spec.dsa_indexer_head_dim:
        d_i, heads = spec.dsa_indexer_head_dim, spec.dsa_indexer_n_heads
        indexer, indexer_norm = (r_q or h) * heads * d_i + h * (d_i + heads), 2 * d_i
    return MixerSize(query + key_value + n * d_v * h + gate + indexer, indexer_norm)


def _size_mamba(spec: ModelSpec) -> MixerSize:
    """Mamba-2 (arXiv:2405.21060): in h (2 d_in + 2 G N + H), convolution over d_in + 2 G N, out d_in h.

    The scan counts 3.5 d_in N multiply-adds, as in Megatron-LM's `mamba_layer_flops`.
    """
    h, state, groups = spec.hidden_size, spec.mamba_state_dim, spec.mamba_num_groups
    d_in = spec.mamba_expand * h
    heads = d_in // spec.mamba_head_dim
    convolved = d_in + 2 * groups * state
    matrices = h * (2 * d_in + 2 * groups * state + heads) + d_in * h
    vectors = convolved * (spec.mamba_d_conv + 1) + 3 * heads + d_in
    return MixerSize(matrices, vectors, 3.5 * d_in * state)


def _size_gated_delta_net(spec: ModelSpec) -> MixerSize:
    """Gated delta net (arXiv:2412.06464): in h (2 H_k d_k + 2 H_v d_v + 2 H_v), out H_v d_v h.

    State and convolution count 4 H_v d_v^2 and their kernel, as in Megatron-LM's `gdn_layer_flops`.
    """
    h, keys, values, heads, d_v, kernel = _list_linear_sizes(spec)
    matrices = h * (2 * keys + 2 * values + 2 * heads) + values * h
    convolution = kernel * (2 * keys + values)
    return MixerSize(matrices, convolution + 2 * heads + d_v, convolution + 4 * heads * d_v**2)


def _size_kimi_delta(spec: ModelSpec) -> MixerSize:
    """Kimi delta attention (arXiv:2510.26692): q, k, v and beta, a decay for each key channel through a latent of d_v,
    an output gate through another one or of full rank, and out.
    """
    h, keys, values, heads, d_v, kernel = _list_linear_sizes(spec)
    decay = h * d_v + d_v * keys
    gate = h * values if spec.linear_full_rank_gate else h * d_v + d_v * values
    matrices = h * (2 * keys + values + heads) + decay + gate + values * h
    convolution = kernel * (2 * keys + values)
    return MixerSize(matrices, convolution + heads + keys + d_v, convolution + 4 * heads * d_v**2)


def _list_linear_sizes(spec: ModelSpec) -> tuple[int, int, int, int, int, int]:
    """h, H_k d_k, H_v d_v, H_v, d_v and the width of the convolution."""
    heads, d_v = spec.linear_num_value_heads or 0, spec.linear_value_head_dim or 0
    keys = (spec.linear_num_key_heads or 0) * (spec.linear_key_head_dim or 0)
    return spec.hidden_size, keys, heads * d_v, heads, d_v, spec.linear_conv_kernel_dim


def _size_short_conv(spec: ModelSpec) -> MixerSize:
    """Gated short convolution (LFM2; transformers `Lfm2ShortConv`): in 3 h^2, a kernel for each channel, out h^2."""
    h = spec.hidden_size
    convolution = h * spec.linear_conv_kernel_dim
    return MixerSize(4 * h * h, convolution, convolution)


def _size_compressed_attention(spec: ModelSpec, ratio: int | None) -> MixerSize:
    """DeepSeek-V4's attention with one key/value head and sinks, over a window and, with a ratio, compressed tokens.

    q = r_q (h + n d); kv = h d, shared by keys and values; o = n d r_o + groups r_o h. A compressor of c channels adds
    2 h c + ratio c + its norm; the sparse kind overlaps (c = 2 d) and has an indexer (Hugging Face
    `DeepseekV4Attention`).
    """
    h, n, d = spec.hidden_size, spec.num_attention_heads, head_dim(spec)
    r_q, r_o, groups = spec.q_lora_rank or 0, spec.o_lora_rank or 0, spec.o_groups
    matrices = r_q * (h + n * d) + h * d + n * d * r_o + groups * r_o * h
    vectors = n + r_q + d
    if ratio is None:
        return MixerSize(matrices, vectors)
    overlap = 2 if ratio == COMPRESSION["sparse"] else 1
    matrices += 2 * h * overlap * d
    vectors += ratio * overlap * d + d
    if ratio == COMPRESSION["sparse"] and spec.dsa_indexer_n_heads and spec.dsa_indexer_head_dim:
        d_i, heads = spec.dsa_indexer_head_dim, spec.dsa_indexer_n_heads
        matrices += 2 * h * overlap * d_i + r_q * heads * d_i + h * heads
        vectors += ratio * overlap * d_i + d_i
    return MixerSize(matrices, vectors)


_SIZES: dict[MixerKind, Callable[[ModelSpec], MixerSize]] = {
    "attention": _size_attention,
    "window": _size_window_attention,
    "mamba": _size_mamba,
    "gated_delta_net": _size_gated_delta_net,
    "kimi_delta": _size_kimi_delta,
    "short_conv": _size_short_conv,
    "compressed": lambda spec: _size_compressed_attention(spec, COMPRESSION["compressed"]),
    "sparse": lambda spec: _size_compressed_attention(spec, COMPRESSION["sparse"]),
    "none": lambda spec: MixerSize(0),
}

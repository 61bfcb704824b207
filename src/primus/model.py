"""What follows from a model's shape: its parameters, and the FLOPs of a token.

Symbols in formulas: L layers, h hidden_size, f ffn_hidden_size, n query heads, g key/value heads, d head width, V
vocabulary, s sequence length; E experts, k experts of a token, fm width of an expert, fs width of the shared experts;
r_q and r_kv latent widths, d_nope, d_rope and d_v head widths of multi-head latent attention (MLA).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from primus.config.schema import ModelSpec

Convention = Literal["causal", "causal_window", "full", "6N"]
"""How the FLOPs of a token are counted, see `flops_per_token`."""


class Layer(Struct, frozen=True):
    """Kind of one transformer layer."""

    moe: bool
    """Mixture of experts instead of a dense feed-forward."""
    window: int | None
    """Tokens that a query sees at most; the whole sequence when None."""


class ParameterCount(Struct, frozen=True, kw_only=True):
    """Parameters of a model, by part."""

    embedding: int
    """Input embedding, V h."""
    output: int
    """Output head, V h; 0 where it shares the embedding's matrix."""
    attention: int
    """All projections with their biases, head norms, latent norms and sinks."""
    dense_ffn: int
    """Feed-forward of the dense layers."""
    experts: int
    """All routed experts."""
    active_experts: int
    """The routed experts that one token passes through."""
    shared_experts: int
    """Experts that every token passes through."""
    router: int
    """Routers with their biases."""
    norm: int
    """Two norms in each layer and the last one."""
    mtp: int
    """Multi-token prediction layers, not part of `total`."""

    @property
    def total(self) -> int:
        """Parameters of the main model."""
        return self.active - self.active_experts + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token uses, both vocabulary matrices included."""
        every_token = self.embedding + self.output + self.attention + self.dense_ffn + self.norm
        return every_token + self.router + self.shared_experts + self.active_experts


# Shape


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


def expert_ffn_size(spec: ModelSpec) -> int:
    """Inner width of one routed expert."""
    return spec.moe_ffn_hidden_size or spec.ffn_hidden_size


def layers(spec: ModelSpec) -> list[Layer]:
    """Kind of each layer, the first one first."""
    return [
        Layer(
            moe=spec.num_experts is not None and index >= spec.first_k_dense_replace,
            window=spec.window_size if index % spec.window_layer_period == 0 else None,
        )
        for index in range(spec.num_layers)
    ]


def num_moe_layers(spec: ModelSpec) -> int:
    """Layers with a mixture of experts."""
    return sum(layer.moe for layer in layers(spec))


def padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int = 1, divisible_by: int = 128) -> int:
    """Vocabulary rounded up so that each tensor-parallel device has a multiple of `divisible_by` rows.

    Source: Megatron-LM `make_vocab_size_divisible_by`.
    """
    multiple = divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


# Parameters


def parameters(spec: ModelSpec) -> ParameterCount:
    """Parameters of the model, part by part, exact.

    A dense model has L [h (n + 2g) d + n d h + 3 h f + 2 h] + h + V h (twice where untied), with (n + 2g) d more
    for each layer's q/k/v bias and 2 d for its head norms. The counts equal those of the published weights
    (tests/test_model.py); the bias that balances DeepSeek-V3's experts counts, as in its Hugging Face weights.
    """
    h, num_moe = spec.hidden_size, num_moe_layers(spec)
    vocabulary = spec.vocab_size * h
    expert, shared, router = _expert(spec), _shared_experts(spec), _router(spec)
    return ParameterCount(
        embedding=vocabulary,
        output=vocabulary if spec.untie_embeddings_and_output_weights else 0,
        attention=spec.num_layers * _attention(spec),
        dense_ffn=(spec.num_layers - num_moe) * _ffn(spec, spec.ffn_hidden_size),
        experts=num_moe * (spec.num_experts or 0) * expert,
        active_experts=num_moe * spec.moe_router_topk * expert,
        shared_experts=num_moe * shared,
        router=num_moe * router,
        norm=(2 * spec.num_layers + 1) * h,
        mtp=spec.mtp_num_layers * _mtp_layer(spec),
    )


def _attention(spec: ModelSpec) -> int:
    """Parameters of one attention layer: projections, their biases, head norms, sinks."""
    if spec.multi_latent_attention:
        return _attention_matrices(spec)
    n, g, d = spec.num_attention_heads, num_query_groups(spec), head_dim(spec)
    qkv_bias = (n + 2 * g) * d if spec.add_qkv_bias or spec.add_bias_linear else 0
    output_bias = spec.hidden_size if spec.add_bias_linear else 0
    head_norms = 2 * d if spec.qk_layernorm else 0
    sinks = n if spec.attention_sinks else 0
    return _attention_matrices(spec) + qkv_bias + output_bias + head_norms + sinks


def _attention_matrices(spec: ModelSpec) -> int:
    """Weights that multiply a token in one attention layer.

    Grouped-query attention: h (n + 2g) d + n d h. MLA, with the norms of its latents, which Megatron-LM counts too:
    q = r_q (h + 1 + n (d_nope + d_rope)), or h n (d_nope + d_rope) without a latent; kv = h (r_kv + d_rope) + r_kv
    (1 + n (d_nope + d_v)); o = n d_v h (DeepSeek-V2, arXiv:2405.04434, section 2.1).
    """
    h, n, d = spec.hidden_size, spec.num_attention_heads, head_dim(spec)
    if not spec.multi_latent_attention:
        return h * (n + 2 * num_query_groups(spec)) * d + n * d * h
    d_nope, d_rope, d_v = spec.qk_head_dim or 0, spec.qk_pos_emb_head_dim or 0, value_head_dim(spec)
    r_q, r_kv = spec.q_lora_rank, spec.kv_lora_rank or 0
    query = r_q * (h + 1 + n * d) if r_q else h * n * d
    key_value = h * (r_kv + d_rope) + r_kv * (1 + n * (d_nope + d_v))
    return query + key_value + n * d_v * h


def _ffn(spec: ModelSpec, width: int) -> int:
    """Parameters of one SwiGLU of inner `width`: gate, up and down, 3 h width, with biases 2 width + h more."""
    bias = 2 * width + spec.hidden_size if spec.add_bias_linear else 0
    return 3 * spec.hidden_size * width + bias


def _expert(spec: ModelSpec) -> int:
    return _ffn(spec, expert_ffn_size(spec)) if spec.num_experts else 0


def _shared_experts(spec: ModelSpec) -> int:
    width = spec.moe_shared_expert_intermediate_size
    return _ffn(spec, width) if width else 0


def _router(spec: ModelSpec) -> int:
    """Parameters of one router: h E, E more with a bias (gpt-oss), E more with a balancing bias (DeepSeek-V3)."""
    return (spec.num_experts or 0) * (spec.hidden_size + spec.add_bias_linear + spec.moe_router_enable_expert_bias)


def _mtp_layer(spec: ModelSpec) -> int:
    """Parameters of one multi-token prediction layer: a layer, a 2h x h projection, the norms of its two inputs and its
    output (DeepSeek-V3, arXiv:2412.19437, section 2.2; embedding and head are shared with the main model).
    """
    h = spec.hidden_size
    ffn = (
        spec.num_experts * _expert(spec) + _shared_experts(spec) + _router(spec)
        if spec.num_experts
        else _ffn(spec, spec.ffn_hidden_size)
    )
    return _attention(spec) + ffn + 2 * h + 2 * h * h + 3 * h


# FLOPs


def flops_per_token(spec: ModelSpec, seq_length: int, convention: Convention = "causal") -> float:
    """FLOPs of one token in training (forward and backward, three times the forward; a multiply-add is two).

    Norms, rotary embedding, softmax, the embedding lookup, the optimizer and recomputation count nowhere. The
    vocabulary is the spec's: pad it first where the trainer pads (`padded_vocab_size`).

    Args:
        spec: The model.
        seq_length: Tokens in one sequence.
        convention: What attention counts, and which parameters.
            `causal`: 6 x (weights that multiply a token) + 6 L n d s; a query sees s/2 keys on average, the router does
            not count, windows are ignored, multi-token prediction counts. Megatron-LM `num_floating_point_operations`;
            Megatron-Bridge since 25.09; MaxText since July 2025 (maxtext#1988).
            `causal_window`: the same, but a query in a layer of window w sees w (1 - (w - 1) / 2s) keys on average.
            `full`: 6 (N - N_embedding) + 12 L n d s, no discount for causality; N are active parameters, with norms,
            biases and router. torchtitan (policy in torchtitan#280); NeMo 24.12.
            `6N`: 6 N, no attention; N as in `full` but with the input embedding. Kaplan et al., arXiv:2001.08361.
            Multi-token prediction is no part of `full` and `6N`.
    """
    if convention in ("causal", "causal_window"):
        return 6 * _causal_weights(spec) + _causal_attention(spec, seq_length, windows=convention == "causal_window")
    count = parameters(spec)
    if convention == "6N":
        return 6 * count.active
    lookup = count.embedding if spec.untie_embeddings_and_output_weights else 0
    return 6 * (count.active - lookup) + 6 * spec.num_layers * _attention_width(spec) * seq_length


def _causal_weights(spec: ModelSpec) -> int:
    """Weights that multiply a token, as Megatron-LM counts them; multi-token prediction layers included.

    A prediction layer adds a layer like the last one, logits (h V), the projection (2 h^2) and three norms (3 h).
    """
    h, depth = spec.hidden_size, spec.mtp_num_layers
    extra_moe = depth if spec.num_experts else 0
    num_moe = num_moe_layers(spec)
    num_dense = spec.num_layers - num_moe + depth - extra_moe
    active_width = spec.moe_router_topk * expert_ffn_size(spec) + (spec.moe_shared_expert_intermediate_size or 0)
    ffn = 3 * h * (num_dense * spec.ffn_hidden_size + (num_moe + extra_moe) * active_width)
    attention = (spec.num_layers + depth) * _attention_matrices(spec)
    return ffn + attention + h * spec.vocab_size * (1 + depth) + depth * (3 * h + 2 * h * h)


def _causal_attention(spec: ModelSpec, seq_length: int, windows: bool) -> float:
    """FLOPs of scores and weighted values of one token; forward 2 n (d_qk + d_v) for each key that it sees."""
    full = seq_length / 2
    spans = [layer.window if windows else None for layer in layers(spec)]
    keys = spec.mtp_num_layers * full + sum(_average_keys(window, seq_length) for window in spans)
    return 6 * _attention_width(spec) * keys


def _average_keys(window: int | None, seq_length: int) -> float:
    """Keys that a query sees on average over a sequence, s/2 without a window."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window * (1 - (window - 1) / (2 * seq_length))


def _attention_width(spec: ModelSpec) -> int:
    """n (d_qk + d_v): multiply-adds of a layer's attention for each key that a query sees."""
    return spec.num_attention_heads * (head_dim(spec) + value_head_dim(spec))

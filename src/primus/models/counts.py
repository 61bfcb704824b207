"""Parameters of a model and FLOPs of a token, computed from the model's shape.

Symbols in formulas: L layers, h hidden_size, f ffn_hidden_size, n query heads, g key/value heads, d head width, V
vocabulary, s sequence length; E experts, k experts of a token, fm width of an expert, fs width of the shared experts.
`layers` has the parameters of each kind of layer.
"""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from primus.config.schema import ModelSpec
from primus.models.layers import (
    LayerKind,
    attention_width,
    head_dim,
    keys_per_query,
    list_layers,
    mixer_size,
    num_query_groups,
    value_head_dim,
)

__all__ = [
    "Convention",
    "LayerKind",
    "ParameterCount",
    "count_parameters",
    "detect_convention",
    "expert_ffn_size",
    "flops_per_token",
    "head_dim",
    "list_layers",
    "num_dense_layers",
    "num_moe_layers",
    "num_query_groups",
    "value_head_dim",
]

Convention = Literal["causal", "causal_window", "full", "6N"]
"""How the FLOPs of a token are counted, see `flops_per_token`."""
CONVENTION_TOLERANCE = 0.005
"""Relative difference of the FLOPs of a token within which a convention is recognized; the nearest two of a model of 8B
parameters are 11 % apart."""


class ParameterCount(Struct, frozen=True, kw_only=True):
    """Parameters of a model, by part."""

    embedding: int
    """Input embedding, V h."""
    output: int
    """Output head, V h; 0 if it shares the embedding's matrix."""
    attention: int
    """All mixers: attention with its biases, head norms, latent norms and sinks; state-space and linear attention."""
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
    """A norm before each mixer and each feed-forward, after it if the model has those too, and the last one."""
    residual: int
    """Hyper-connections (DeepSeek-V4) or attention residuals (Kimi K3)."""
    mtp: int
    """Multi-token prediction layers, not part of `total`."""

    @property
    def total_parameters(self) -> int:
        """Parameters of the main model."""
        return self.active_parameters - self.active_experts + self.experts

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, both vocabulary matrices included."""
        every_token = self.embedding + self.output + self.attention + self.dense_ffn + self.norm + self.residual
        return every_token + self.router + self.shared_experts + self.active_experts


def expert_ffn_size(spec: ModelSpec) -> int:
    """Inner width of one routed expert."""
    return spec.moe_ffn_hidden_size or spec.ffn_hidden_size


def num_moe_layers(spec: ModelSpec) -> int:
    """Layers with a mixture of experts."""
    return sum(layer.moe for layer in list_layers(spec))


def num_dense_layers(spec: ModelSpec) -> int:
    """Layers with a dense feed-forward, including those that run experts in parallel with it."""
    return sum(layer.feed_forward and (not layer.moe or spec.moe_parallel_dense) for layer in list_layers(spec))


def count_parameters(spec: ModelSpec) -> ParameterCount:
    """Parameters of the model, part by part, exact.

    A dense model has L [h (n + 2g) d + n d h + 3 h f + 2 h] + h + V h (twice if untied), with (n + 2g) d more
    for each layer's q/k/v bias and 2 d for its head norms. The counts equal those of the published weights
    (tests/test_model.py); the bias that balances DeepSeek-V3's experts counts, as in its Hugging Face weights.
    """
    kinds = list_layers(spec)
    num_moe = num_moe_layers(spec)
    vocabulary = spec.vocab_size * spec.hidden_size
    expert = _count_expert(spec)
    return ParameterCount(
        embedding=vocabulary,
        output=vocabulary if spec.untie_embeddings_and_output_weights else 0,
        attention=sum(mixer_size(spec, layer.mixer).parameters for layer in kinds),
        dense_ffn=num_dense_layers(spec) * _count_ffn(spec, spec.ffn_hidden_size),
        experts=num_moe * (spec.num_experts or 0) * expert,
        active_experts=num_moe * spec.moe_router_topk * expert,
        shared_experts=num_moe * _count_shared_experts(spec),
        router=num_moe * _count_router(spec) - _count_hash_biases(spec, num_moe),
        norm=_count_norms(spec, kinds),
        residual=_count_residual(spec),
        mtp=spec.mtp_num_layers * _count_mtp_layer(spec),
    )


def _count_norms(spec: ModelSpec, kinds: list[LayerKind]) -> int:
    """h for each norm: before a mixer and a feed-forward, after them too (Gemma, Grok) or only (OLMo 2), and the last.

    Gemma 4 has three more around experts that run in parallel with a dense feed-forward.
    """
    each = spec.pre_layernorm + spec.post_layernorm
    norms = sum(each * ((layer.mixer != "none") + layer.feed_forward) for layer in kinds)
    parallel = 3 * num_moe_layers(spec) if spec.moe_parallel_dense else 0
    return (norms + parallel + 1) * spec.hidden_size


def _count_residual(spec: ModelSpec) -> int:
    """Weights that mix the residual streams.

    Hyper-connections of m streams: before each mixer and feed-forward (2 + m) m (m h + 1) + 3, at the end m (m h + 1) +
    1 (DeepSeek-V4, Hugging Face `DeepseekV4HyperConnection`). Attention residuals: a norm and a projection to one
    score, 2 h, before each mixer but the first, each feed-forward and the end (Kimi K3).
    """
    h, m = spec.hidden_size, spec.num_residual_streams
    if m > 1:
        return spec.num_layers * 2 * ((2 + m) * m * (m * h + 1) + 3) + m * (m * h + 1) + 1
    return 2 * spec.num_layers * 2 * h if spec.attn_res_block_size else 0


def _count_ffn(spec: ModelSpec, width: int, inputs: int | None = None) -> int:
    """Parameters of one gated unit of inner `width`: gate, up and down, 3 h width, with biases 2 width + h more."""
    bias = 2 * width + spec.hidden_size if spec.add_bias_linear else 0
    return 3 * (inputs or spec.hidden_size) * width + bias


def _count_expert(spec: ModelSpec) -> int:
    return _count_ffn(spec, expert_ffn_size(spec), spec.moe_latent_size) if spec.num_experts else 0


def _count_shared_experts(spec: ModelSpec) -> int:
    """The shared experts with their gate (Qwen3-Next), and the projections to and from the experts' latent width."""
    h, width, latent = spec.hidden_size, spec.moe_shared_expert_intermediate_size, spec.moe_latent_size
    shared = _count_ffn(spec, width) if width else 0
    gate = h if spec.moe_shared_expert_gate else 0
    return shared + gate + (2 * h * latent + latent if latent else 0)


def _count_router(spec: ModelSpec) -> int:
    """Parameters of one router: h E, E more with a bias (gpt-oss), E more with a balancing bias (DeepSeek-V3).

    Gemma 4's scales its input and each expert: h + E more.
    """
    experts = spec.num_experts or 0
    scales = spec.hidden_size + experts if spec.moe_parallel_dense else 0
    return experts * (spec.hidden_size + spec.add_bias_linear + spec.moe_router_enable_expert_bias) + scales


def _count_hash_biases(spec: ModelSpec, num_moe: int) -> int:
    """Balancing biases that layers with hash routing lack (DeepSeek-V4, Hugging Face `DeepseekV4HashRouter`).

    Their table of experts by token holds integers that are not trained, so that it does not count.
    """
    biases = (spec.num_experts or 0) * spec.moe_router_enable_expert_bias
    return min(spec.num_hash_layers, num_moe) * biases


def _count_mtp_layer(spec: ModelSpec) -> int:
    """Parameters of one multi-token prediction layer: a layer, a 2h x h projection, the norms of its two inputs and its
    output (DeepSeek-V3, arXiv:2412.19437, section 2.2; embedding and head are shared with the main model).
    """
    h = spec.hidden_size
    ffn = (
        spec.num_experts * _count_expert(spec) + _count_shared_experts(spec) + _count_router(spec)
        if spec.num_experts
        else _count_ffn(spec, spec.ffn_hidden_size)
    )
    return mixer_size(spec, list_layers(spec)[-1].mixer).parameters + ffn + 2 * h + 2 * h * h + 3 * h


# FLOPs


def flops_per_token(spec: ModelSpec, seq_length: int, convention: Convention = "causal") -> float:
    """FLOPs of one token in training (forward and backward, three times the forward; a multiply-add is two).

    Norms, rotary embedding, softmax, the embedding lookup, the optimizer and recomputation do not count. The
    vocabulary is the spec's, without padding for tensor parallelism.

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
            `full` and `6N` exclude multi-token prediction.
    """
    if convention in ("causal", "causal_window"):
        prediction = [replace(list_layers(spec)[-1], window=None)] * spec.mtp_num_layers
        kinds, windows = [*list_layers(spec), *prediction], convention == "causal_window"
        return 6 * _count_causal_weights(spec, kinds) + _count_attention_flops(spec, kinds, seq_length, windows)
    count = count_parameters(spec)
    if convention == "6N":
        return 6 * count.active_parameters
    lookup = count.embedding if spec.untie_embeddings_and_output_weights else 0
    return 6 * (count.active_parameters - lookup) + 2 * _count_attention_flops(
        spec, list_layers(spec), seq_length, windows=False
    )


def _count_causal_weights(spec: ModelSpec, kinds: list[LayerKind]) -> float:
    """Weights that multiply a token, as Megatron-LM counts them; multi-token prediction layers and states included.

    A prediction layer adds a layer like the last one, logits (h V), the projection (2 h^2) and three norms (3 h).
    """
    h, depth, latent = spec.hidden_size, spec.mtp_num_layers, spec.moe_latent_size
    extra_moe = depth if spec.num_experts else 0
    num_moe, num_dense = num_moe_layers(spec) + extra_moe, num_dense_layers(spec) + depth - extra_moe
    expert = 3 * spec.moe_router_topk * expert_ffn_size(spec) * (latent or h) + 2 * h * (latent or 0)
    shared = 3 * (spec.moe_shared_expert_intermediate_size or 0) * h
    ffn = num_dense * 3 * spec.ffn_hidden_size * h + num_moe * (expert + shared)
    mixers = [mixer_size(spec, layer.mixer) for layer in kinds]
    mixing = sum(mixer.matrices + mixer.state for mixer in mixers)
    return ffn + mixing + h * spec.vocab_size * (1 + depth) + depth * (3 * h + 2 * h * h)


def _count_attention_flops(spec: ModelSpec, kinds: list[LayerKind], seq_length: int, windows: bool) -> float:
    """FLOPs of scores and weighted values of one token; forward 2 n (d_qk + d_v) for each key that it sees."""
    return 6 * sum(attention_width(spec, layer) * keys_per_query(spec, layer, seq_length, windows) for layer in kinds)


def detect_convention(spec: ModelSpec, seq_length: int, flops: float) -> Convention | None:
    """The convention by which a token of the model has `flops`; None if no convention gives them."""
    expected = {name: flops_per_token(spec, seq_length, name) for name in get_args(Convention)}
    nearest: Convention = min(expected, key=lambda name: abs(expected[name] - flops))
    return nearest if abs(expected[nearest] / flops - 1) <= CONVENTION_TOLERANCE else None

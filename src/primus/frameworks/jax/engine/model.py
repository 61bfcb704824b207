"""The decoder-only transformer of the JAX engine, a function of weights under their Hugging Face names (`stacking`).

Shape suffixes: B batch, S sequence, D model width, H query heads, K key/value heads, C channels of one head,
R = C / 2 rotated pairs, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from primus.config.schema import ModelSpec
from primus.data.training.masks import DocumentHandling
from primus.frameworks.jax.engine.stacking import LAYER_PREFIX, is_stacked
from primus.models.counts import head_dim

Weights = Mapping[str, Array]
"""Arrays by Hugging Face name, those of the layers stacked (`stacking`)."""

IGNORED_TARGET = -100
"""Target that the loss ignores, as in `primus.data.training.masks`."""
LOGITS_IN_MEMORY = 2**24
"""Logits of one chunk of the loss: 64 MiB in float32."""


@dataclass(frozen=True)
class ModelSettings:
    """What the forward pass depends on in addition to the weights."""

    spec: ModelSpec
    compute_dtype: jnp.dtype
    """Type of activations and of the weights' copies in matrix products."""
    recompute: bool = False
    """Recompute the activations of each layer in the backward pass."""
    loss_chunk_size: int | None = None
    """Tokens of a sequence whose logits are in memory at once; derived from the vocabulary when None."""
    documents: DocumentHandling | None = None
    residual_sharding: PartitionSpec | None = None
    """Sharding of the residual stream [B, S, D] over the mesh in use; None on one device."""


def compute_loss_sum(weights: Weights, tokens_BS: Array, targets_BS: Array, settings: ModelSettings) -> Array:
    """Sum of the losses of all tokens that have a target, float32."""
    hidden_BSD = compute_hidden_states(weights, tokens_BS, settings)
    head_VD = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).astype(settings.compute_dtype)
    length = _choose_chunk_length(tokens_BS.shape, settings)
    if length == tokens_BS.shape[1]:
        return _sum_token_losses(hidden_BSD, head_VD, targets_BS)

    # Recomputed in the backward pass, so that the logits of one chunk are in memory at a time.
    @jax.checkpoint
    def add_chunk(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        return total + _sum_token_losses(chunk[0], head_VD, chunk[1]), None

    chunks = (_split_sequence(hidden_BSD, length), _split_sequence(targets_BS, length))
    return jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), chunks)[0]


def compute_hidden_states(weights: Weights, tokens_BS: Array, settings: ModelSettings) -> Array:
    """Hidden states [B, S, D] after the last norm."""
    hidden_BSD = weights["model.embed_tokens.weight"][tokens_BS].astype(settings.compute_dtype)
    hidden_BSD = _shard_residual(hidden_BSD, settings)
    rotation, mask = _compute_rotation_and_mask(tokens_BS, settings)

    def apply_layer(hidden_BSD: Array, layer: Weights) -> tuple[Array, None]:
        return _apply_layer(hidden_BSD, layer, rotation, mask, settings), None

    layers = {name.removeprefix(LAYER_PREFIX): value for name, value in weights.items() if is_stacked(name)}
    hidden_BSD, _ = jax.lax.scan(jax.checkpoint(apply_layer) if settings.recompute else apply_layer, hidden_BSD, layers)
    return _normalize_rms(hidden_BSD, weights["model.norm.weight"], settings.spec.norm_epsilon)


def compute_frequencies(spec: ModelSpec) -> np.ndarray:
    """Radians per position of each rotated pair, [R], float32.

    Source: RoFormer (arXiv 2104.09864), section 3.2.2; the scaling of Llama 3.1 is `apply_scaling` of
    meta-llama/llama-models: long wavelengths are stretched by the factor, short ones kept, those between interpolated.
    """
    channels = head_dim(spec)
    exponents_R = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    frequencies_R = (np.float32(1.0) / np.float32(spec.rotary_base) ** exponents_R).astype(np.float32)
    if spec.rope_type != "llama3":
        return frequencies_R
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    rotations_R = np.float32(spec.original_max_position_embeddings) * frequencies_R / np.float32(2 * math.pi)
    kept_R = np.clip((rotations_R - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return (frequencies_R * (kept_R + (1.0 - kept_R) / np.float32(spec.rotary_scaling_factor))).astype(np.float32)


def _apply_layer(
    hidden_BSD: Array, layer: Weights, rotation: tuple[Array, Array], mask: Array | None, settings: ModelSettings
) -> Array:
    """Attention and feed-forward, each on a normalized copy of the residual stream."""
    epsilon = settings.spec.norm_epsilon
    normed_BSD = _normalize_rms(hidden_BSD, layer["input_layernorm.weight"], epsilon)
    hidden_BSD = _shard_residual(hidden_BSD + _attend(normed_BSD, layer, rotation, mask, settings), settings)
    normed_BSD = _normalize_rms(hidden_BSD, layer["post_attention_layernorm.weight"], epsilon)
    # SwiGLU, arXiv 2002.05202, equation 6.
    gate_BSF = _project(normed_BSD, layer, "mlp.gate_proj")
    inner_BSF = jax.nn.silu(gate_BSF) * _project(normed_BSD, layer, "mlp.up_proj")
    return _shard_residual(hidden_BSD + _project(inner_BSF, layer, "mlp.down_proj"), settings)


def _attend(
    x_BSD: Array, layer: Weights, rotation: tuple[Array, Array], mask: Array | None, settings: ModelSettings
) -> Array:
    """Causal grouped-query attention."""
    channels, epsilon = head_dim(settings.spec), settings.spec.norm_epsilon
    q_BSHC, k_BSKC, v_BSKC = (
        _project(x_BSD, layer, f"self_attn.{name}_proj").reshape(*x_BSD.shape[:2], -1, channels) for name in "qkv"
    )
    if settings.spec.qk_layernorm:
        q_BSHC = _normalize_rms(q_BSHC, layer["self_attn.q_norm.weight"], epsilon)
        k_BSKC = _normalize_rms(k_BSKC, layer["self_attn.k_norm.weight"], epsilon)
    q_BSHC, k_BSKC = _rotate_pairs(q_BSHC, *rotation), _rotate_pairs(k_BSKC, *rotation)
    mixed_BSHC = jax.nn.dot_product_attention(q_BSHC, k_BSKC, v_BSKC, mask=mask, is_causal=mask is None)
    return _project(mixed_BSHC.reshape(*x_BSD.shape[:2], -1), layer, "self_attn.o_proj")


def _project(x: Array, layer: Weights, name: str) -> Array:
    """A projection in the type of its input, so that the weights may be float32."""
    product = x @ layer[f"{name}.weight"].astype(x.dtype).T
    bias = layer.get(f"{name}.bias")
    return product if bias is None else product + bias.astype(x.dtype)


def _normalize_rms(x: Array, weight_D: Array, epsilon: float) -> Array:
    """x / rms(x) * weight over the last dimension, in float32 inside (arXiv 1910.07467, equation 4)."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + epsilon)
    return (wide * scale * weight_D).astype(x.dtype)


def _rotate_pairs(x: Array, cosine: Array, sine: Array) -> Array:
    """Each pair (i, i + C / 2) of channels turned by its position's angle; the pairing of Hugging Face weights."""
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)


def _compute_rotation_and_mask(tokens_BS: Array, settings: ModelSettings) -> tuple[tuple[Array, Array], Array | None]:
    """Cosine and sine of each position, [1 or B, S, 1, R], and the keys that each query sees; None for all earlier."""
    rules = settings.documents
    positions_BS = jnp.arange(tokens_BS.shape[1])[None]
    mask = None
    if rules is not None:
        ends_BS = tokens_BS == rules.eod_id
        if rules.reset_positions:
            positions_BS = _count_positions(ends_BS)
        if rules.reset_attention:
            mask = _build_document_mask(ends_BS)
    angles = positions_BS.astype(jnp.float32)[:, :, None, None] * jnp.asarray(compute_frequencies(settings.spec))
    return (jnp.cos(angles).astype(settings.compute_dtype), jnp.sin(angles).astype(settings.compute_dtype)), mask


def _count_positions(ends_BS: Array) -> Array:
    """Position of each token within its document; the end-of-document token belongs to the document that it ends."""
    index_S = jnp.arange(ends_BS.shape[1])
    begins_BS = jnp.pad(ends_BS[:, :-1], ((0, 0), (1, 0)))
    return index_S - jax.lax.cummax(jnp.where(begins_BS, index_S, 0), axis=1)


def _build_document_mask(ends_BS: Array) -> Array:
    """Whether a query may see a key: not later, and of the same document; [B, 1, S, S]."""
    document_BS = jnp.cumsum(ends_BS, axis=1) - ends_BS
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return jnp.tril(same_BSS)[:, None]


def _sum_token_losses(hidden_BSD: Array, head_VD: Array, targets_BS: Array) -> Array:
    logits_BSV = (hidden_BSD @ head_VD.T).astype(jnp.float32)
    is_valid_BS = targets_BS != IGNORED_TARGET
    target_BS1 = jnp.where(is_valid_BS, targets_BS, 0)[..., None]
    losses_BS = jax.nn.logsumexp(logits_BSV, -1) - jnp.take_along_axis(logits_BSV, target_BS1, -1)[..., 0]
    return sum_rows_pairwise(jnp.where(is_valid_BS, losses_BS, 0.0)).sum()


def sum_rows_pairwise(values_BS: Array) -> Array:
    """Sum of each row [B], by adding halves.

    On a CPU, XLA adds one value after the other: the mean of 512 losses of 6 is then wrong by up to 3e-6 in float32.
    Rows are whole on a device; the batch is sharded.
    """
    while (length := values_BS.shape[1]) > 1:
        values_BS = jnp.pad(values_BS, ((0, 0), (0, length % 2)))
        half = values_BS.shape[1] // 2
        values_BS = values_BS[:, :half] + values_BS[:, half:]
    return values_BS[:, 0]


def _choose_chunk_length(shape: tuple[int, ...], settings: ModelSettings) -> int:
    """Tokens of each sequence in one chunk of the loss: the largest divisor of the length within the limit."""
    batch, length = shape
    asked = settings.loss_chunk_size or max(1, LOGITS_IN_MEMORY // settings.spec.vocab_size)
    limit = max(1, min(length, asked // batch))
    return next(size for size in range(limit, 0, -1) if length % size == 0)


def _split_sequence(x: Array, length: int) -> Array:
    """Chunks along the sequence as the first dimension: [S / length, B, length, ...]."""
    chunks = x.reshape(x.shape[0], -1, length, *x.shape[2:])
    return jnp.moveaxis(chunks, 1, 0)


def _shard_residual(hidden_BSD: Array, settings: ModelSettings) -> Array:
    if settings.residual_sharding is None:
        return hidden_BSD
    return jax.lax.with_sharding_constraint(hidden_BSD, settings.residual_sharding)

"""The arithmetic between the matrix products: normalization, activation, rotation and attention.

Each function has a plain formula, which the compiler fuses, and for an eager CPU an autograd Function that makes fewer
passes over memory than the derivatives of the formula (measured in docs/native-speed.md).

Shape suffixes: B batch, S sequence, H query heads, K key/value heads, G = H / K, C channels of one head, R rows of
queries in a block, D width, F feed-forward width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

SINK_CHANNELS = 8
"""Channels of a sink: one has its logit, and kernels want a multiple of eight."""

QUERY_ROWS = 128
"""Queries in one block of the attention's backward pass: the scores of a block stay in the cache."""

Plan = Literal["eager", "compiled"]
"""How an accelerator would run the layers."""
_plan: Plan | None = None
"""Of this process; the compiler can read a global of a module, but no ContextVar."""


@contextmanager
def plan_accelerator(plan: Plan | None) -> Iterator[None]:
    """Within it, tensors of the CPU stand for those of an accelerator; nothing changes if None."""
    global _plan
    _plan, before = plan, _plan
    try:
        yield
    finally:
        _plan = before


def is_on_cpu(x: Tensor) -> bool:
    """Whether `x` is computed by a CPU."""
    return x.device.type == "cpu" and _plan is None


def is_planned_compiled() -> bool:
    """Whether tensors stand for those of an accelerator whose layers are compiled."""
    return _plan == "compiled"


def is_eager_on_cpu(x: Tensor) -> bool:
    """Whether operators with derivatives of their own run: the compiler fuses plain formulas itself.

    What it keeps for the backward pass is as little as they do, so that they stand for a planned compiled layer.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and _plan != "eager"


def choose_wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and exponentials: float32, or that of a wider model."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside (arXiv 1910.07467, equation 4)."""
    if is_eager_on_cpu(x):
        if not torch.is_grad_enabled():  # an autograd Function costs as much as what it computes for one token
            return _normalize(x, weight_D, epsilon)[0]
        return _RMSNorm.apply(x, weight_D, epsilon)
    wide = x.to(choose_wide_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight_D.to(wide.dtype)).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension (arXiv 2002.05202, equation 6)."""
    if is_eager_on_cpu(gate_up):
        if not torch.is_grad_enabled():
            gate, up = gate_up.chunk(2, -1)
            return F.silu(gate).mul_(up)
        return _SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of GELU (arXiv 2002.05202, equation 6; Gemma)."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def derive_swiglu(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of `swiglu` with respect to its input."""
    gate, up = gate_up.chunk(2, -1)
    if not is_eager_on_cpu(gate_up):
        opened = torch.sigmoid(gate)
        return torch.cat((grad * up * opened * (1 + gate * (1 - opened)), grad * gate * opened), -1)
    grad_gate_up = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, -1)
    # Written into the halves of one tensor: the matrix product of the packed projection reads it whole.
    torch.mul(grad, F.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return grad_gate_up


def apply_rotary(x_BSHC: Tensor, cosine_S1C: Tensor, sine_S1C: Tensor) -> Tensor:
    """Each pair (i, i + C / 2) of channels turned by its position's angle; the pairing of Hugging Face weights.

    The tables come from `rope.compute_tables`, whose sine is negative in its first half; they are [B, S, 1, C] if the
    sequences have different positions.
    """
    if is_eager_on_cpu(x_BSHC):
        if not torch.is_grad_enabled():
            return _apply_rotation(x_BSHC, cosine_S1C, sine_S1C, 1)
        return _Rotate.apply(x_BSHC, cosine_S1C, sine_S1C)
    first, second = x_BSHC.chunk(2, -1)
    cosine, sine = cosine_S1C.chunk(2, -1)[1], sine_S1C.chunk(2, -1)[1]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def causal_attention(
    q_BHSC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    mask: Tensor | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal softmax(q k^T / sqrt(C)) v, shape [B, H, S, C]; H may be a multiple of K (grouped queries).

    Args:
        q_BHSC: Queries; if they are fewer than the keys, those of the last positions.
        k_BKSC: Keys.
        v_BKSC: Values.
        mask: Which keys each query sees, [B, 1, S, S], instead of all that are not later.
        sinks_H: For each head the logit of one more key, which has no value (gpt-oss).
        softcap: Soft limit of the scores, softcap x tanh(score / softcap) (Gemma 2); not with sinks.
        window: Without a mask, how many of the last keys each query sees; all when None.
    """
    if mask is None and window is not None and window < q_BHSC.shape[2]:
        return _attend_in_blocks(q_BHSC, k_BKSC, v_BKSC, sinks_H, softcap, window)
    if softcap is not None:
        args = q_BHSC, k_BKSC, v_BKSC, mask, softcap
        # The scores are several times larger than all else of a layer: they are computed again in the backward pass.
        return checkpoint(_attend_softly, *args, use_reentrant=False, preserve_rng_state=False)
    if sinks_H is not None:
        return _attend_with_sinks(q_BHSC, k_BKSC, v_BKSC, mask, sinks_H)
    if mask is not None:
        return _attend_with_mask(q_BHSC, k_BKSC, v_BKSC, mask)
    is_whole = q_BHSC.shape[2] == k_BKSC.shape[2]
    if is_whole and is_on_cpu(q_BHSC) and q_BHSC.dtype == torch.bfloat16 and torch.is_grad_enabled():
        return _CausalAttention.apply(q_BHSC, k_BKSC, v_BKSC)
    return _compute_attention(q_BHSC, k_BKSC, v_BKSC)


def _compute_attention(
    q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    grouped, (queries, keys) = q_BHSC.shape[1] != k_BKSC.shape[1], (q_BHSC.shape[2], k_BKSC.shape[2])
    if mask is None and queries < keys:
        if q_BHSC.device.type == "cpu":
            # As CausalBias is made to on a CPU; it cannot be created while a mode observes operators.
            mask = torch.ones((queries, keys), dtype=torch.bool, device=q_BHSC.device).tril(keys - queries)
        else:
            mask = causal_lower_right(queries, keys)
    return F.scaled_dot_product_attention(
        q_BHSC, k_BKSC, v_BKSC, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _attend_with_mask(q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor) -> Tensor:
    """Keys and values are repeated for their queries: torch's kernels that take a mask know no groups."""
    num_queries, groups = q_BHSC.shape[1] // k_BKSC.shape[1], k_BKSC.shape[1]
    if q_BHSC.shape[2] == 1:  # the queries of a key, as rows of one matrix: nothing is repeated
        rows_BKGC = q_BHSC.unflatten(1, (groups, num_queries)).flatten(2, 3)
        if is_eager_on_cpu(q_BHSC) and not torch.is_grad_enabled() and mask.dtype == torch.bool:
            return _attend_one_query(rows_BKGC, k_BKSC, v_BKSC, mask).reshape(q_BHSC.shape)
        if mask.shape[1] > 1:
            mask = mask.unflatten(1, (groups, num_queries)).flatten(2, 3)
        return F.scaled_dot_product_attention(rows_BKGC, k_BKSC, v_BKSC, attn_mask=mask).reshape(q_BHSC.shape)
    k_BHSC, v_BHSC = (x.repeat_interleave(num_queries, 1) for x in (k_BKSC, v_BKSC))
    return F.scaled_dot_product_attention(q_BHSC, k_BHSC, v_BHSC, attn_mask=mask)


def _attend_one_query(rows_BKGC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask_B11S: Tensor) -> Tensor:
    """By two products: torch's fused kernel on a CPU needs twice the time for one query (benchmarks/results)."""
    scores = (rows_BKGC * rows_BKGC.shape[-1] ** -0.5) @ k_BKSC.transpose(2, 3)
    scores.masked_fill_(~mask_B11S, -math.inf)
    return scores.softmax(-1, dtype=choose_wide_dtype(scores.dtype)).to(v_BKSC.dtype) @ v_BKSC


def _attend_in_blocks(
    q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, sinks_H: Tensor | None, softcap: float | None, window: int
) -> Tensor:
    """Blocks of as many queries as the window has keys, which see their own block and the one before: a mask of the
    whole sequence, or scores, would grow with its square."""
    batch, _, length, _ = q_BHSC.shape
    blocks = [F.pad(x, (0, 0, 0, -length % window)).unflatten(2, (-1, window)) for x in (q_BHSC, k_BKSC, v_BKSC)]
    number = blocks[0].shape[2]
    q, k, v = (x.transpose(1, 2) for x in blocks)
    # [B, N, K, 2 W, C]; before the first block are zeros, which nothing sees.
    k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], x), 3) for x in (k, v))
    rows = torch.arange(window, device=q.device).unsqueeze(1)
    keys = torch.arange(2 * window, device=q.device)
    seen = (keys > rows) & (keys <= rows + window)
    first = torch.arange(number, device=q.device).view(-1, 1, 1, 1) > 0
    mask = (seen & (first | (keys >= window))).repeat(batch, 1, 1, 1)
    mixed = causal_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, sinks_H, softcap)
    return mixed.unflatten(0, (batch, number)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _attend_with_sinks(q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None, sinks_H: Tensor) -> Tensor:
    """The sink is the first key, which only a further channel of the queries sees: torch's kernels know no sinks, and
    as an entry in the mask it would need one of each head."""
    batch, heads, length, channels = q_BHSC.shape
    if length == 1 and mask is not None:  # of a cache, whose keys are not repeated for a single query
        hidden = torch.zeros(mask.shape, dtype=q_BHSC.dtype, device=q_BHSC.device).masked_fill(~mask, -math.inf)
        sinks = sinks_H.to(q_BHSC.dtype).view(1, -1, 1, 1).expand(hidden.shape[0], -1, 1, -1)
        k_BKSC, v_BKSC = (F.pad(x, (0, 0, 0, 1)) for x in (k_BKSC, v_BKSC))
        whole = torch.cat((hidden.expand(-1, heads, -1, -1), sinks), -1)
        return _attend_with_mask(q_BHSC, k_BKSC, v_BKSC, whole)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_BKSC, v_BKSC))
    sink = (sinks_H * math.sqrt(channels)).to(q_BHSC.dtype).view(1, -1, 1, 1).expand(batch, -1, -1, -1)
    q = F.pad(F.pad(q_BHSC, (0, 1), value=1.0), (0, SINK_CHANNELS - 1))
    k = torch.cat((F.pad(sink, (channels, SINK_CHANNELS - 1)), F.pad(k, (0, SINK_CHANNELS))), 2)
    v = F.pad(v, (0, SINK_CHANNELS, 1, 0))
    mask = None if mask is None else F.pad(mask, (1, 0), value=True)
    return _compute_attention(q, k, v, mask, channels**-0.5)[..., :channels]


def _attend_softly(q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask: Tensor | None, softcap: float) -> Tensor:
    """All scores are in memory: torch's kernels limit none."""
    num_queries = q_BHSC.shape[1] // k_BKSC.shape[1]
    k_BHSC, v_BHSC = (x.repeat_interleave(num_queries, 1) for x in (k_BKSC, v_BKSC))
    scores = softcap * torch.tanh((q_BHSC * (q_BHSC.shape[-1] ** -0.5 / softcap)) @ k_BHSC.transpose(2, 3))
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    wide = choose_wide_dtype(scores.dtype)
    return scores.masked_fill(~mask, -math.inf).softmax(-1, dtype=wide).to(v_BHSC.dtype) @ v_BHSC


def _normalize(x: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `rms_norm`; and 1 / rms of each row."""
    # One fused pass in float32 instead of square, mean and their float32 copies of a bf16 `x`.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=choose_wide_dtype(x.dtype))
    scale = (norm.square_() / x.shape[-1]).add_(epsilon).rsqrt_()
    return (x * scale).mul_(weight_D).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        y, scale = _normalize(x, weight_D, epsilon)
        # `scale` is one number for each row; the normalized rows are cheaper to compute again than to keep.
        ctx.save_for_backward(x, weight_D, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight_D, scale = ctx.saved_tensors
        wide_dtype = choose_wide_dtype(x.dtype)
        grad, weight = grad.to(wide_dtype), weight_D.to(wide_dtype)
        normed = x * scale
        # Shared by both gradients: its column sums are the weight's, its weighted row sums the input's.
        product = grad * normed
        grad_weight_D = product.flatten(0, -2).sum(0)
        mean = (product @ weight).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight_D.to(weight_D.dtype), None


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up only; writes both gradients side by side, as the packed projection wants them."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        # The input only: the backward pass computes the activation again, which saves memory.
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (gate_up,) = ctx.saved_tensors
        return derive_swiglu(grad, gate_up)


class _Rotate(torch.autograd.Function):
    """The halves swap places by `roll`, which moves them in one pass over whole rows.

    The derivative of a rotation is the rotation by the opposite angle: nothing but the tables is kept.
    """

    @staticmethod
    def forward(ctx, x_BSHC: Tensor, cosine_S1C: Tensor, sine_S1C: Tensor) -> Tensor:
        ctx.save_for_backward(cosine_S1C, sine_S1C)
        return _apply_rotation(x_BSHC, cosine_S1C, sine_S1C, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BSHC: Tensor):
        cosine_S1C, sine_S1C = ctx.saved_tensors
        # The tables have no gradient: positions are not learned.
        return _apply_rotation(grad_BSHC, cosine_S1C, sine_S1C, -1), None, None


def _apply_rotation(x_BSHC: Tensor, cosine_S1C: Tensor, sine_S1C: Tensor, sign: int) -> Tensor:
    swapped_BSHC = x_BSHC.roll(x_BSHC.shape[-1] // 2, -1)
    return (x_BSHC * cosine_S1C).addcmul_(swapped_BSHC, sine_S1C, value=sign)


class _CausalAttention(torch.autograd.Function):
    """torch's attention with a backward pass for bfloat16 on the CPU, where torch's own is slower than in float32.

    Blocks of queries are taken against all keys they see, so that no more than [B, H, R, S] scores are in memory.
    """

    @staticmethod
    def forward(ctx, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor) -> Tensor:
        # No probabilities: [B, H, S, S] would grow with the square of the sequence.
        ctx.save_for_backward(q_BHSC, k_BKSC, v_BKSC)
        return _compute_attention(q_BHSC, k_BKSC, v_BKSC)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSC: Tensor):
        q_BHSC, k_BKSC, v_BKSC = ctx.saved_tensors
        batch, groups, length, channels = k_BKSC.shape
        scale = 1.0 / math.sqrt(channels)
        grouped = (batch * groups, -1, length, channels)  # [B K, G, S, C]: queries of one key are rows of one matrix
        q, grad = (q_BHSC * scale).reshape(grouped), grad_BHSC.reshape(grouped)
        k, v = k_BKSC.reshape(-1, length, channels), v_BKSC.reshape(-1, length, channels)
        grad_q = torch.empty_like(q)
        # float32 because every block of queries adds to them; each row of `grad_q` is written once.
        grad_k = torch.zeros_like(k, dtype=torch.float32)
        grad_v = torch.zeros_like(v, dtype=torch.float32)
        for start in range(0, length, QUERY_ROWS):
            end = min(start + QUERY_ROWS, length)
            rows = slice(start, end)
            # Causal: the queries of this block see no key from `end` on.
            block = _compute_block_gradients(q[:, :, rows], k[:, :end], v[:, :end], grad[:, :, rows], start)
            grad_q[:, :, rows] = block[0].view(grad_q[:, :, rows].shape)
            grad_k[:, :end] += block[1]
            grad_v[:, :end] += block[2]
        return (
            grad_q.mul_(scale).view(q_BHSC.shape),
            grad_k.to(k.dtype).view(k_BKSC.shape),
            grad_v.to(v.dtype).view(v_BKSC.shape),
        )


def _compute_block_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scaled queries, keys and values; queries begin at `start`, keys at 0."""
    num_rows = q.shape[2]
    future = torch.full((num_rows, num_rows), -math.inf, dtype=q.dtype).triu_(1)
    q, grad = q.flatten(1, 2), grad.flatten(1, 2)
    scores = q @ k.transpose(1, 2)
    # Only the last square is partly masked; all earlier keys are visible to all queries of the block.
    scores.unflatten(1, (-1, num_rows))[..., start:] += future
    # Computed again from queries and keys, as in FlashAttention (arXiv 2205.14135, section 3.1).
    probabilities = torch.softmax(scores, -1)
    grad_probabilities = grad @ v.transpose(1, 2)
    # The derivative of softmax needs its output only, not the scores.
    grad_scores = torch.ops.aten._softmax_backward_data(grad_probabilities, probabilities, -1, scores.dtype)
    return grad_scores @ k, grad_scores.transpose(1, 2) @ q, probabilities.transpose(1, 2) @ grad

"""One dense transformer layer, operator by operator.

Shape suffixes: B batch, S sequence, D model, H query heads, K key/value heads, E width of a head, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue, MeasuredCall, Mode
from primus.config.schema import ModelSpec
from primus.measure.kernels.attention import BACKWARD_FACTOR, AttentionShape
from primus.measure.kernels.gemm import DTYPES, SEED
from primus.models.counts import head_dim, num_query_groups

EPSILON = 1e-5
"""Epsilon of RMSNorm (Llama 3 config.json, rms_norm_eps)."""


class LayerOperator(NamedTuple):
    """One operator with its inputs; all of them have gradients."""

    name: str
    run: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    flop: float = 0.0
    """Operations of the forward pass."""
    backward_factor: float = 2.0
    """Operations of the backward pass relative to the forward pass: two products for each."""


class DenseLayer:
    """The operators of a Llama-like layer."""

    def __init__(self, spec: ModelSpec, batch: int, seqlen: int) -> None:
        self.batch, self.seqlen = batch, seqlen
        self.hidden, self.ffn, self.width = spec.hidden_size, spec.ffn_hidden_size, head_dim(spec)
        self.heads, self.groups = spec.num_attention_heads, num_query_groups(spec)

    def list_operators(self) -> list[LayerOperator]:
        """The operators in the order of the layer, then the whole layer."""
        b, s, d, f, e = self.batch, self.seqlen, self.hidden, self.ffn, self.width
        qkv, attended = (self.heads + 2 * self.groups) * e, self.heads * e
        hidden, heads = (b, s, d), (b, self.heads, s, e)

        def make_linear(name: str, inputs: int, outputs: int) -> LayerOperator:
            shapes = ((b, s, inputs), (outputs, inputs))
            return LayerOperator(name, functional.linear, shapes, 2.0 * b * s * inputs * outputs)

        attention = AttentionShape(b, s, self.heads, self.groups, e, e, causal=True)
        keys = (b, self.groups, s, e)
        operators = [
            LayerOperator("norm", normalize_rms, (hidden, (d,))),
            make_linear("qkv", d, qkv),
            LayerOperator("rotary", rotate_positions, (heads,)),
            LayerOperator(
                "attention", attend_causally, (heads, keys, keys), attention.count_flop(is_backward=False),
                BACKWARD_FACTOR,
            ),
            make_linear("attention_out", attended, d),
            make_linear("gate_up", d, 2 * f),
            LayerOperator("silu_mul", multiply_gate, ((b, s, 2 * f),)),
            make_linear("down", f, d),
            LayerOperator("residual", torch.add, (hidden, hidden)),
        ]  # fmt: skip
        weights = ((d,), (qkv, d), (d, attended), (d,), (2 * f, d), (d, f))
        whole = sum(operator.flop for operator in operators)
        factor = sum(operator.flop * operator.backward_factor for operator in operators) / whole
        return [*operators, LayerOperator("layer", self.run_layer, (hidden, *weights), whole, factor)]

    def run_layer(self, x_BSD: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """The whole layer."""
        norm, qkv, out, ffn_norm, gate_up, down = weights
        b, s, e = self.batch, self.seqlen, self.width
        mixed = functional.linear(normalize_rms(x_BSD, norm), qkv).view(b, s, -1, e).transpose(1, 2)
        q_BHSE, k_BKSE, v_BKSE = mixed.split([self.heads, self.groups, self.groups], dim=1)
        seen = attend_causally(rotate_positions(q_BHSE), rotate_positions(k_BKSE), v_BKSE)
        x_BSD = x_BSD + functional.linear(seen.transpose(1, 2).reshape(b, s, -1), out)
        hidden = multiply_gate(functional.linear(normalize_rms(x_BSD, ffn_norm), gate_up))
        return x_BSD + functional.linear(hidden, down)


def normalize_rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm."""
    return functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def rotate_positions(x_BHSE: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding with halves (arXiv:2104.09864); the angles are computed in the call."""
    half = x_BHSE.shape[-1] // 2
    rate = 10000.0 ** -(torch.arange(half, device=x_BHSE.device) / half)
    angle = torch.arange(x_BHSE.shape[2], device=x_BHSE.device)[:, None] * rate
    cos, sin = angle.cos().to(x_BHSE.dtype), angle.sin().to(x_BHSE.dtype)
    first, second = x_BHSE[..., :half], x_BHSE[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend_causally(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention by the implementation that PyTorch chooses."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def multiply_gate(x_BSF: torch.Tensor) -> torch.Tensor:
    """SwiGLU's activation."""
    gate, up = x_BSF.chunk(2, dim=-1)
    return functional.silu(gate) * up


def measure_layer(
    context: BenchmarkContext, spec: ModelSpec, batch: int, seqlen: int, dtype: str
) -> Iterator[BenchmarkRow]:
    """A row for each operator and direction."""
    for operator in DenseLayer(spec, batch, seqlen).list_operators():
        for is_backward in (False, True):
            case: dict[str, CaseValue] = {
                "operator": operator.name,
                "direction": "backward" if is_backward else "forward",
                "batch": batch,
                "seqlen": seqlen,
                "dtype": dtype,
            }
            yield from context.measure(case, partial(_make_call, context, operator, dtype, is_backward))


def _make_call(
    context: BenchmarkContext, operator: LayerOperator, dtype: str, is_backward: bool, mode: Mode
) -> MeasuredCall:
    kind = DTYPES[dtype]
    generator = torch.Generator(context.device).manual_seed(SEED)
    inputs = [
        (torch.empty(shape, device=context.device, dtype=kind).normal_(generator=generator) * 0.02).requires_grad_()
        for shape in operator.shapes
    ]
    out = operator.run(*inputs)
    moved = sum(tensor.nbytes for tensor in (*inputs, out))
    flop = operator.flop
    call: Callable[[], object] = partial(_run_without_gradients, operator, inputs)
    if is_backward:
        flop, moved = flop * operator.backward_factor, 2 * moved
        gradient = torch.randn_like(out)
        call = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
    return MeasuredCall(
        call=call,
        flop=flop or None,
        moved_bytes=moved,
        dtype=dtype,
        value="time",
        check=lambda: int((~torch.isfinite(out)).sum()),
        convention="median time of the operator by itself; bytes: inputs and result once, in the backward pass also "
        "their gradients; FLOP of linear layers and attention only",
    )


def _run_without_gradients(operator: LayerOperator, inputs: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return operator.run(*inputs)

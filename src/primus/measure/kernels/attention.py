"""Attention by the implementations that are installed, with its FLOPs and a check of the result.

Shape suffixes: B batch, H query heads, K key/value heads, S sequence, D width of a head, V width of a value head.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue, MeasuredCall, Mode
from primus.errors import PrimusError
from primus.measure.kernels.gemm import DTYPES, SEED

SDPA_BACKENDS = {
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "default": [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ],
}
PACKAGES = {"flash_attn": "flash_attn", "aiter": "aiter"}
"""Packages with a function ``flash_attn_func(q_BSHD, k_BSKD, v_BSKV, causal=, window_size=)``."""
BACKWARD_FACTOR = 2.5
"""Products of the backward pass relative to the forward pass, which recomputes one of two: 5 to 2
(FlashAttention-2, arXiv:2307.08691, section 4.1)."""
CHECKED_TOKENS = 64

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AttentionShape(NamedTuple):
    """Sizes of one attention."""

    batch: int
    seqlen: int
    heads: int
    groups: int
    head_dim: int
    v_head_dim: int
    causal: bool
    window: int | None = None

    def count_keys(self) -> float:
        """Keys that a query sees on average: s/2 if causal, fewer in a window."""
        s, w = self.seqlen, self.window
        if w is None or w >= s:
            return s / 2 if self.causal else float(s)
        return w * (1 - (w - 1) / (2 * s)) if self.causal else float(w)

    def count_flop(self, *, is_backward: bool) -> float:
        """2 B n s keys (d_qk + d_v), which is 4 B n s^2 d for full attention of equal widths; 2.5 times in backward."""
        widths = self.head_dim + self.v_head_dim
        forward = 2.0 * self.batch * self.heads * self.seqlen * self.count_keys() * widths
        return forward * BACKWARD_FACTOR if is_backward else forward

    def count_bytes(self, item_bytes: int, *, is_backward: bool) -> int:
        """Queries, keys, values and result once; in the backward pass also their gradients."""
        per_token = self.heads * (self.head_dim + self.v_head_dim) + self.groups * (self.head_dim + self.v_head_dim)
        return self.batch * self.seqlen * per_token * item_bytes * (2 if is_backward else 1)

    def describe_case(self, backend: str, dtype: str, *, is_backward: bool, model: str) -> dict[str, CaseValue]:
        """What identifies the measurement of this shape."""
        return {
            **({"model": model} if model else {}),
            "backend": backend,
            "direction": "backward" if is_backward else "forward",
            **{name: value for name, value in self._asdict().items() if value is not None},
            "dtype": dtype,
        }


def measure_attention(
    context: BenchmarkContext, shape: AttentionShape, backend: str, dtype: str, *, is_backward: bool, model: str = ""
) -> Iterator[BenchmarkRow]:
    """Rows of one implementation and direction.

    Args:
        model: Model of the shape, which the rows name.
    """
    case = shape.describe_case(backend, dtype, is_backward=is_backward, model=model)
    yield from context.measure(case, partial(_make_call, context, shape, backend, dtype, is_backward))


def _make_call(
    context: BenchmarkContext, shape: AttentionShape, backend: str, dtype: str, is_backward: bool, mode: Mode
) -> MeasuredCall:
    item_bytes = DTYPES[dtype].itemsize
    context.count_sets(2 * shape.count_bytes(item_bytes, is_backward=is_backward), "warm")  # refuses what does not fit
    attend = find_attention(backend, shape, context.device)
    inputs = create_inputs(shape, DTYPES[dtype], context.device, needs_grad=is_backward)
    call: Callable[[], object]
    if is_backward:
        out = attend(*inputs)
        gradient = torch.randn_like(out)
        call = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
    else:
        # A first call here, so that an implementation that does not take these inputs fails before the warm-up.
        out = attend(*inputs)
        call = partial(attend, *inputs)
    return MeasuredCall(
        call=call,
        flop=shape.count_flop(is_backward=is_backward),
        moved_bytes=shape.count_bytes(item_bytes, is_backward=is_backward),
        dtype=dtype,
        check=lambda: count_wrong(shape, inputs, out),
        convention="2 B n s keys (d_qk + d_v) FLOP forward, 2.5 times in backward, / median time; keys: s/2 if causal, "
        f"fewer in a window; normal random, seed {SEED}",
    )


def create_inputs(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (B, H, S, D), keys (B, K, S, D) and values (B, K, S, V)."""
    generator = torch.Generator(device).manual_seed(SEED)

    def random(heads: int, width: int) -> torch.Tensor:
        size = (shape.batch, heads, shape.seqlen, width)
        made = torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)
        return made.requires_grad_(needs_grad)

    q_BHSD, k_BKSD = random(shape.heads, shape.head_dim), random(shape.groups, shape.head_dim)
    return q_BHSD, k_BKSD, random(shape.groups, shape.v_head_dim)


def find_attention(backend: str, shape: AttentionShape, device: torch.device) -> Attention:
    """The implementation as a function of queries, keys and values.

    Raises:
        PrimusError: Its package is not installed.
    """
    if backend in PACKAGES:
        return _find_package_attention(backend, shape)
    has_window = shape.window is not None and shape.window < shape.seqlen
    mask = make_window_mask(shape).to(device) if has_window else None
    is_causal = shape.causal and mask is None

    def attend(q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSV: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return functional.scaled_dot_product_attention(
                q_BHSD,
                k_BKSD,
                v_BKSV,
                attn_mask=mask,
                is_causal=is_causal,
                enable_gqa=shape.groups != shape.heads,
            )

    return attend


def _find_package_attention(backend: str, shape: AttentionShape) -> Attention:
    try:
        function: Any = importlib.import_module(PACKAGES[backend]).flash_attn_func
    except (ImportError, AttributeError) as error:
        raise PrimusError(f"{PACKAGES[backend]} is not installed: {error}") from None
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0 if shape.causal else shape.window - 1)

    def attend(q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSV: torch.Tensor) -> torch.Tensor:
        # The package has the sequence before the heads: a view, without a copy.
        inputs = (tensor.transpose(1, 2) for tensor in (q_BHSD, k_BKSD, v_BKSV))
        out: torch.Tensor = function(*inputs, causal=shape.causal, window_size=window)
        return out.transpose(1, 2)

    return attend


def make_window_mask(shape: AttentionShape, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Which keys each query sees, with its own token as the last of the window if causal."""
    query = (torch.arange(shape.seqlen) if rows is None else rows.cpu())[:, None]
    key = torch.arange(shape.seqlen)[None, :]
    seen = torch.ones(len(query), shape.seqlen, dtype=torch.bool)
    if shape.causal:
        seen &= key <= query
    if shape.window is not None:
        seen &= query - key < shape.window
        if not shape.causal:
            seen &= key - query < shape.window
    return seen


def count_wrong(
    shape: AttentionShape, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out_BHSV: torch.Tensor
) -> int:
    """Elements that are not finite, or differ from fp32 attention of some tokens of the first sequence."""
    device = out_BHSV.device
    rows = torch.linspace(0, shape.seqlen - 1, min(CHECKED_TOKENS, shape.seqlen), device=device).long()
    repeats = shape.heads // shape.groups
    with torch.no_grad():
        q_HSD = inputs[0][0].index_select(1, rows).float()
        k_HSD, v_HSV = (each[0].repeat_interleave(repeats, dim=0).float() for each in inputs[1:])
        scores = q_HSD @ k_HSD.transpose(1, 2) / shape.head_dim**0.5
        seen = make_window_mask(shape, rows).to(device)
        exact = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v_HSV
        found = out_BHSV[0].index_select(1, rows).float()
        # Weights and result are rounded to the type; values are of size 1, a weighted mean of them is smaller.
        tolerance = 8 * torch.finfo(out_BHSV.dtype).eps * (1 + exact.abs())
        return int(((found - exact).abs() > tolerance).sum()) + int((~torch.isfinite(out_BHSV)).sum())

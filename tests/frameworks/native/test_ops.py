"""The eager Functions against their formulas and derivatives in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from primus.frameworks.native.engine import documents, ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative to the norm: float32 keeps 24 bits of mantissa and bfloat16 8, through at most about ten operations."""


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def assert_same_function(ours, formula, inputs: list[torch.Tensor]) -> None:
    """`ours` on `inputs` gives the value and gradients of `formula` on the same numbers in float64."""
    wide = [value.detach().double().requires_grad_() for value in inputs]
    result, expected = ours(*inputs), formula(*wide)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(99)).to(result.dtype)
    result.backward(direction)
    expected.backward(direction.double())
    tolerance = TOLERANCE[inputs[0].dtype]
    assert relative_error(result, expected) < tolerance
    for value, exact in zip(inputs, wide, strict=True):
        assert value.grad.dtype == value.dtype
        assert relative_error(value.grad, exact.grad) < tolerance


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the norm of `exact`, or to 1 where that vanishes (the attention of one token has no gradient)."""
    scale = exact.norm() if exact.norm() > 1e-6 else 1.0
    return ((value.detach().double() - exact.detach()).norm() / scale).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(dtype: torch.dtype) -> None:
    def formula(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    inputs = [normal(2, 5, 48, dtype=dtype, seed=0), normal(48, dtype=dtype, seed=1)]
    assert_same_function(lambda x, weight: ops.rms_norm(x, weight, 1e-5), formula, inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu(dtype: torch.dtype) -> None:
    def formula(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    assert_same_function(ops.swiglu, formula, [normal(2, 5, 96, dtype=dtype, seed=2)])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotate(dtype: torch.dtype) -> None:
    angle = torch.linspace(0, 6, 7 * 8, dtype=torch.float64).view(7, 1, 8)
    cosine, sine = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)

    def formula(x):
        turned = torch.complex(x[..., :8].contiguous(), x[..., 8:].contiguous()) * torch.polar(angle * 0 + 1, angle)
        return torch.cat((turned.real, turned.imag), -1)

    inputs = [normal(2, 7, 3, 16, dtype=dtype, seed=3)]
    assert_same_function(lambda x: ops.apply_rotary(x, cosine.to(dtype), sine.to(dtype)), formula, inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("length", [1, 100, ops.QUERY_ROWS, ops.QUERY_ROWS + 1, 300])
def test_causal_attention(dtype: torch.dtype, heads: int, groups: int, length: int) -> None:
    def formula(q, k, v):
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    shapes = [(2, heads, length, 16), (2, groups, length, 16), (2, groups, length, 16)]
    assert_same_function(ops.causal_attention, formula, [normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)])


def test_attention_takes_the_layout_that_the_packed_projection_gives() -> None:
    packed = normal(2, 200, 3 * 4, 16, dtype=torch.bfloat16, seed=5)
    parts = [part.transpose(1, 2) for part in packed.split(4, 2)]
    copies = [part.detach().contiguous().requires_grad_() for part in parts]
    ops.causal_attention(*parts).sum().backward()
    ops.causal_attention(*copies).sum().backward()
    expected = torch.cat([copy.grad.transpose(1, 2) for copy in copies], 2)
    assert relative_error(packed.grad, expected.double()) < 1e-2


@pytest.mark.parametrize(("window", "has_mask"), [(None, False), (3, True), (3, False)])
def test_a_sink_takes_a_share_of_the_attention_and_adds_nothing(window: int | None, has_mask: bool) -> None:
    """Without a mask, a window is in blocks, of which the last one is not whole."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 7, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_()
    mask = documents.limit_to_window(None, window, 7, q.device) if window and has_mask else None
    distance = torch.arange(7)[:, None] - torch.arange(7)[None, :]
    visible = (distance >= 0) & (distance < (window or 7))
    scores = (q @ k.repeat_interleave(2, 1).mT / 2.0).masked_fill(~visible, -torch.inf)
    shares = torch.cat((scores, sinks.view(1, 4, 1, 1).expand(2, -1, 7, -1)), -1).softmax(-1)[..., :-1]
    expected = shares @ v.repeat_interleave(2, 1)
    found = ops.causal_attention(q, k, v, mask, sinks, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, plain = (torch.autograd.grad(each.square().sum(), sinks) for each in (found, expected))
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)


def test_a_window_stays_within_documents() -> None:
    """The second document begins at position 4."""
    whole = documents.build_attention_mask(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]))
    mask = documents.limit_to_window(whole, 3, 8, whole.device)[0, 0]
    assert [row.nonzero().flatten().tolist() for row in mask][3:] == [[1, 2, 3], [4], [4, 5], [4, 5, 6], [5, 6, 7]]


def test_softly_limited_scores_are_not_kept_for_the_backward_pass() -> None:
    sizes: list[int] = []
    q, k, v = (torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda each: sizes.append(each.numel()) or each, lambda each: each):
        ops.causal_attention(q, k, v, softcap=5.0).sum().backward()
    assert max(sizes, default=0) < 2 * 64 * 64

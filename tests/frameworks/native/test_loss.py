"""Chunked linear cross-entropy against torch's own over whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.frameworks.native.engine.loss import (
    CHUNK_BYTES,
    IGNORED,
    TILE,
    LossSettings,
    _exponentiate,
    _find_largest,
    _sum_exponentials,
    choose_chunk,
    count_targets,
    cross_entropy,
)
from primus.frameworks.native.engine.ops import plan_accelerator


def inputs(tokens: int, width: int, vocabulary: int, seed: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden, weight, targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float):
    """The same loss and gradients in float64, with every logit in memory."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = scale * F.cross_entropy(hidden @ weight.t(), targets, ignore_index=IGNORED, reduction="sum")
    loss.backward()
    return loss, hidden.grad, weight.grad


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(1, 70),
    chunk=st.integers(1, 50),
    ignored=st.sets(st.integers(0, 39)),
    seed=st.integers(0, 1000),
)
def test_any_chunk_gives_the_loss_and_gradients_of_whole_logits(tokens, vocabulary, chunk, ignored, seed) -> None:
    """Tolerance: float32 rounding of sums over at most 40 tokens."""
    hidden, weight, targets = inputs(tokens, 16, vocabulary, seed)
    targets[[index for index in ignored if index < tokens]] = IGNORED
    loss = cross_entropy(hidden, weight, targets, torch.tensor(0.25, dtype=torch.float64), LossSettings(chunk))
    loss.backward()
    for ours, expected in zip((loss, hidden.grad, weight.grad), plain(hidden, weight, targets, 0.25), strict=True):
        torch.testing.assert_close(ours.double(), expected.detach(), rtol=2e-4, atol=2e-4)


@pytest.mark.slow  # three compiled passes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside torch while it compiles
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_fused_passes_give_the_loss_and_gradients_of_plain_ones(softcap: float | None) -> None:
    """As on an accelerator, whose code this CPU runs; tolerance: float32 rounding."""
    found = []
    for is_fused in (True, False):
        hidden, weight, targets = inputs(24, 16, 70, 5)
        with plan_accelerator("eager"):
            loss = cross_entropy(hidden, weight, targets, None, LossSettings(10, softcap, is_fused))
        loss.backward()
        found.append((loss, hidden.grad, weight.grad))
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logits = exact[0] @ exact[1].t()
    bent = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    F.cross_entropy(bent, targets, reduction="sum").backward()
    torch.testing.assert_close(found[0], found[1])
    for one, other in zip(found[0][1:], (each.grad for each in exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_a_target_in_the_part_of_another_process_adds_nothing_here() -> None:
    """The logit of the target is that of the one process whose columns have it, also next to their borders."""
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 4, 5, 9]).unsqueeze(1)
    largest = _find_largest(logits, None)
    parts = [_sum_exponentials(logits[:, begin : begin + 5], largest, targets - begin, None) for begin in (0, 5)]
    torch.testing.assert_close(parts[0] + parts[1], _sum_exponentials(logits, largest, targets, None))


@pytest.mark.parametrize("chunk", [64, 300, 512])
def test_bf16_gradients_stay_within_its_rounding(chunk: int) -> None:
    """Tolerance: logits and their gradient are rounded to 8 bits, 2**-8 each, and errors average out over a sum."""
    hidden, weight, targets = inputs(512, 64, 300, 0, torch.bfloat16)
    with torch.no_grad():
        weight.copy_(weight.bfloat16())
        hidden.mul_(0.3)
    loss = cross_entropy(hidden, weight, targets, None, LossSettings(chunk))
    loss.backward()
    expected_loss, expected_hidden, expected_weight = plain(hidden, weight, targets, 1.0)
    assert loss.dtype == torch.float64
    assert weight.grad.dtype == torch.float32
    assert abs(loss.item() / expected_loss.item() - 1) < 1e-3
    assert (hidden.grad - expected_hidden).norm() / expected_hidden.norm() < 1e-2
    assert (weight.grad - expected_weight).norm() / expected_weight.norm() < 1e-2


def make_trained_logits(tokens: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with the spread of trained models: a wide bell and some likely tokens; each fourth row is certain."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(tokens, vocabulary, generator=generator)
    likely = torch.randint(0, vocabulary, (tokens, 8), generator=generator)
    logits.scatter_(1, likely, 18 + torch.rand(tokens, 8, generator=generator))
    logits[::4].scatter_(1, likely[::4, :1], 30.0)
    return logits, likely[:, torch.randint(0, 8, (), generator=generator)]


def compute_exact(logits: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype):
    """The mean loss of `logits` and its gradient, float64; the product with a unit matrix rounds nothing."""
    exact = logits.to(dtype).double().requires_grad_()
    loss = F.cross_entropy(exact, targets)
    loss.backward()
    return loss.item(), exact.grad


@pytest.mark.parametrize(
    ("dtype", "gradient_tolerance"), [(torch.float32, 2e-7), (torch.float64, 1e-13), (torch.bfloat16, 4e-3)]
)
@pytest.mark.parametrize("vocabulary", [1003, 49152])
def test_the_loss_of_logits_as_trained_models_have_is_that_of_float64(dtype, gradient_tolerance, vocabulary) -> None:
    """Tolerance: of float32, a few of its units (6e-8); of a gradient in bfloat16, one (4e-3)."""
    logits, targets = make_trained_logits(40, vocabulary)
    expected_loss, expected_gradient = compute_exact(logits, targets, dtype)
    hidden = torch.eye(len(logits), dtype=dtype)
    weight = logits.t().to(dtype).contiguous().requires_grad_()
    loss = cross_entropy(hidden, weight, targets, torch.tensor(1 / 40, dtype=torch.float64), LossSettings(16))
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss, abs=1e-7)
    assert (weight.grad.t() - expected_gradient).norm() / expected_gradient.norm() < gradient_tolerance


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_formula_of_gpus_and_of_the_compiler_gives_the_loss_of_float64(device: str) -> None:
    logits, targets = make_trained_logits(40, 49152)
    expected_loss, expected_gradient = compute_exact(logits, targets, torch.float32)
    losses, gradient, totals = _exponentiate(logits.to(device), targets.to(device).unsqueeze(1))
    assert losses.mean().item() == pytest.approx(expected_loss, abs=1e-7)
    error = (gradient / totals / 40).cpu() - expected_gradient
    assert error.norm() / expected_gradient.norm() < 2e-7


def test_the_gradient_follows_what_is_done_with_the_loss() -> None:
    hidden, weight, targets = inputs(30, 8, 20, 1)
    (3.0 * cross_entropy(hidden, weight, targets, None, LossSettings(7))).backward()
    _, expected_hidden, expected_weight = plain(hidden, weight, targets, 3.0)
    torch.testing.assert_close(hidden.grad.double(), expected_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), expected_weight, rtol=1e-4, atol=1e-4)


def test_only_ignored_targets_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight, targets = inputs(10, 8, 20, 2)
    loss = cross_entropy(hidden, weight, torch.full_like(targets, IGNORED), None, LossSettings(4))
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_huge_logits_neither_overflow_nor_lose_the_loss() -> None:
    hidden, weight, targets = inputs(12, 8, 20, 3)
    loss = cross_entropy(hidden * 1000.0, weight, targets, None, LossSettings(5))
    expected, _, _ = plain(hidden * 1000.0, weight, targets, 1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_nan_in_the_hidden_state_reaches_the_loss() -> None:
    hidden, weight, targets = inputs(12, 8, 20, 4)
    with torch.no_grad():
        hidden[3, 2] = torch.nan
    assert cross_entropy(hidden, weight, targets, None, LossSettings(5)).isnan()


def test_the_loss_without_gradients_is_the_same() -> None:
    hidden, weight, targets = inputs(33, 8, 20, 5)
    trained = cross_entropy(hidden, weight, targets, None, LossSettings(8))
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(hidden, weight, targets, None, LossSettings(8)), trained.detach())


def test_the_default_chunk_holds_a_bounded_number_of_bytes() -> None:
    for vocabulary in (1000, 32000, 128256, 262144):
        for dtype in (torch.float32, torch.bfloat16):
            hidden = torch.empty(1, dtype=dtype)
            chunk = choose_chunk(vocabulary, hidden)
            assert chunk % TILE == 0
            assert chunk == TILE or chunk * vocabulary * hidden.element_size() <= CHUNK_BYTES["cpu"]


def test_targets_are_counted_without_the_ignored() -> None:
    assert count_targets(torch.tensor([[1, IGNORED], [IGNORED, 0]])).item() == 2

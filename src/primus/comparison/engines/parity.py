"""The numbers of a comparison of engines: differences of losses, gradient norms and tokens from a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct, structs

from primus.engine_keys import KeyDifference

LARGEST_ULPS = 2
"""Units in the last place by which losses may differ at step 1, since they are float32: 1.9e-6 for losses from 8 on."""


LARGEST_RATE_DIFFERENCE = 1e-6
"""Relative difference of learning rates that rounding explains: some engines compute them in float32."""


class ParityTolerance(Struct, frozen=True, kw_only=True):
    """Largest differences that count as equal."""

    first_loss: float
    """Limit for the loss of the first step, where all engines have the same weights."""
    loss: float
    """Limit for the loss of any step."""
    grad_norm: float
    """Relative limit for the gradient norm of any step."""


FLOAT32 = ParityTolerance(first_loss=1e-6, loss=5e-5, grad_norm=1e-4)
"""Float32 on CPUs. Engines that agree differ by rounding, at most 1e-5; a wrong setting shows at 1e-4 and above (weight
decay of norms: 2e-4)."""
BFLOAT16 = ParityTolerance(first_loss=2e-3, loss=5e-2, grad_norm=0.1)
"""Engines round to bfloat16 at different places, so that only gross errors show."""


class EngineSteps(Struct, frozen=True, kw_only=True):
    """What an engine did."""

    engine: str
    run: str | None = None
    """Run folder; None if the run did not start."""
    problem: str = ""
    """The reason why the engine did not take all steps; empty if it did."""
    hint: str = ""
    exit_code: int = 0
    interrupted_by: int | None = None
    """Signal that stopped the comparison during this run."""
    losses: list[float | None] = []
    """Loss of each step; None where it is not a finite number. The two lists below have the same form."""
    grad_norms: list[float | None] = []
    learning_rates: list[float | None] = []
    tokens: list[int] | None = None
    """Checksum of the samples of each step; None if the engine reads its own data."""
    settings: list[KeyDifference] = []
    """Settings in which it cannot agree with native."""
    notes: list[str] = []
    """Notes that resolving the experiment for it gave, such as settings of another engine alone."""


class EngineParity(EngineSteps, frozen=True, kw_only=True):
    """An engine against the reference."""

    steps: int
    """Steps that both took."""
    loss_differences: list[float]
    """Absolute difference at each of these steps; infinite (null in JSON) where only one of the two is a number."""
    grad_norm_differences: list[float]
    """Relative difference at each of these steps."""
    first_loss_difference: float | None
    max_loss_difference: float | None
    max_loss_step: int | None
    max_grad_norm_difference: float | None
    """Largest relative difference."""
    max_grad_norm_step: int | None
    first_step_above: int | None
    """First step of which a difference is above the tolerance; None if there is none."""
    same_tokens: bool | None
    """Whether every step had the same tokens; None if that is not known."""
    first_step_of_other_tokens: int | None
    first_step_of_other_learning_rate: int | None

    @property
    def agrees(self) -> bool:
        """Whether all steps were taken, on the same tokens, within the tolerance."""
        return not self.problem and self.first_step_above is None and self.same_tokens is not False


def compare_steps(reference: EngineSteps, other: EngineSteps, tolerance: ParityTolerance) -> EngineParity:
    """Differences of `other` from `reference` on the steps that both took."""
    losses = _list_differences(reference.losses, other.losses)
    norms = _list_differences(reference.grad_norms, other.grad_norms, relative=True)
    allowed = [max(tolerance.first_loss, LARGEST_ULPS * _find_ulp(reference.losses)), *[tolerance.loss] * len(losses)]
    above = [
        step
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
        if not (loss <= allowed[step - 1] and norm <= tolerance.grad_norm)
    ]
    other_tokens = _find_first_other(reference.tokens, other.tokens)
    known = reference.tokens is not None and other.tokens is not None
    return EngineParity(
        **structs.asdict(other),
        steps=len(losses),
        loss_differences=losses,
        grad_norm_differences=norms,
        first_loss_difference=losses[0] if losses else None,
        max_loss_difference=max(losses, default=None),
        max_loss_step=losses.index(max(losses)) + 1 if losses else None,
        max_grad_norm_difference=max(norms, default=None),
        max_grad_norm_step=norms.index(max(norms)) + 1 if norms else None,
        first_step_above=above[0] if above else None,
        same_tokens=other_tokens is None if known else None,
        first_step_of_other_tokens=other_tokens,
        first_step_of_other_learning_rate=_find_first_other_rate(reference.learning_rates, other.learning_rates),
    )


def _list_differences(
    reference: Sequence[float | None], other: Sequence[float | None], *, relative: bool = False
) -> list[float]:
    """Absolute difference at each common step; infinite where only one value is a number."""
    found = []
    for ours, theirs in zip(reference, other, strict=False):
        if ours is None or theirs is None:
            found.append(0.0 if ours is theirs else math.inf)
        else:
            found.append(abs(ours - theirs) / (abs(ours) or 1.0) if relative else abs(ours - theirs))
    return found


def _find_ulp(losses: Sequence[float | None]) -> float:
    """Spacing of float32 numbers at the first loss."""
    first = losses[0] if losses else None
    return 2.0 ** (math.floor(math.log2(first)) - 23) if first and first > 0 else 0.0


def _find_first_other_rate(reference: Sequence[float | None], other: Sequence[float | None]) -> int | None:
    """First step whose learning rates differ by more than float32 rounds; None if there is none."""
    gaps = _list_differences(reference, other, relative=True)
    return next((step for step, gap in enumerate(gaps, 1) if not gap <= LARGEST_RATE_DIFFERENCE), None)


def _find_first_other(reference: Sequence[int] | None, other: Sequence[int] | None) -> int | None:
    """First step whose tokens differ; None if there is none, or the tokens are not known."""
    pairs = enumerate(zip(reference or (), other or (), strict=False), 1)
    return next((step for step, (ours, theirs) in pairs if ours != theirs), None)

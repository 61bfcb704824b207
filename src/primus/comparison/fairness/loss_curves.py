"""Whether two loss curves are of the same training: within the spread of trainings that differ only in their seed.

Where no other seeds were trained, the noise of the curves themselves is a lower bound of that spread: another seed
trains on other batches, so that its losses differ at least by the noise from batch to batch. Only differences far below
that bound are called equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from msgspec import Struct

LossCurve = Mapping[int, float]
"""Losses by step."""
NUM_STEPS = 100
"""First steps whose mean difference is compared."""
WINDOW = 10
"""Steps over which a difference must last to be a divergence: single losses are noisy."""
ROUNDING = {"fp32": 5e-5, "bf16": 5e-2}
"""Differences that rounding explains, as in `compare engines` (docs/compare-engines.md, Tolerance)."""


FEWEST_FOR_NOISE = 20
"""Steps from which the noise of a curve is estimated."""
NOISE_SHARE = 0.05
"""Most of the noise that two curves may differ by where the spread between seeds is not measured. Trainings with other
seeds see other batches, and differ by more than the whole noise."""
MAD_FACTOR = 1.4826
"""Standard deviation of a normal variable by its median absolute deviation."""


class LossSpread(Struct, frozen=True, kw_only=True):
    """How much trainings differ that differ only in their seed."""

    mean: float
    """Mean absolute difference of two of them over the first steps."""
    by_step: dict[int, float]
    """Largest absolute difference of two of them at each step."""
    num_seeds: int


class LossAgreement(Struct, frozen=True, kw_only=True):
    """Whether two curves are of the same training."""

    is_equal: bool | None
    """None if it cannot be said."""
    reason: str
    mean_difference: float | None = None
    diverges_at: int | None = None


def estimate_loss_spread(curves: Sequence[LossCurve]) -> LossSpread | None:
    """The spread of at least two trainings with different seeds; None if they have no common steps."""
    if len(curves) < 2:
        return None
    common = sorted(set.intersection(*(set(curve) for curve in curves)))[:NUM_STEPS]
    pairs = list(itertools.combinations(curves, 2))
    gaps = {step: [abs(a[step] - b[step]) for a, b in pairs] for step in common}
    finite = {step: values for step, values in gaps.items() if all(map(math.isfinite, values))}
    if not finite:
        return None
    mean = fmean(value for values in finite.values() for value in values)
    return LossSpread(mean=mean, by_step={step: max(v) for step, v in finite.items()}, num_seeds=len(curves))


def estimate_noise(curve: LossCurve, steps: Sequence[int]) -> float:
    """Standard deviation of a loss from batch to batch, from second differences, which a trend does not change.

    The median is that of most steps: the first ones, in which the loss falls fast, do not increase it.
    """
    values = [curve[step] for step in steps]
    second = [abs(b - (a + c) / 2) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return MAD_FACTOR * median(second) / math.sqrt(1.5) if len(values) >= FEWEST_FOR_NOISE else 0.0


def compare_loss_curves(
    a: LossCurve, b: LossCurve, spread: LossSpread | None, precision: str | None = None
) -> LossAgreement:
    """Compare the losses of the first common steps.

    Without a spread, only differences that rounding or the noise of the curves explains are called equal; larger ones
    cannot be judged.

    Args:
        a: The one curve.
        b: The other curve.
        spread: Differences between seeds, if they were measured.
        precision: Of both trainings, if it is the same.
    """
    common = sorted(a.keys() & b.keys())[:NUM_STEPS]
    if not common:
        return LossAgreement(is_equal=None, reason="losses of common steps are not stated")
    bad = next((step for step in common if math.isfinite(a[step]) != math.isfinite(b[step])), None)
    if bad is not None:
        return LossAgreement(is_equal=False, reason=f"one loss is not finite at step {bad}", diverges_at=bad)
    gaps = {step: abs(a[step] - b[step]) for step in common if math.isfinite(a[step])}
    if not gaps:
        return LossAgreement(is_equal=None, reason="no loss is finite")
    mean, largest = fmean(gaps.values()), max(gaps.values())
    rounding = ROUNDING.get(precision or "", 0.0)
    if largest <= rounding:
        reason = f"they differ by at most {largest:.2g}, which rounding in {precision} explains" if largest else "equal"
        return LossAgreement(is_equal=True, reason=reason, mean_difference=mean)
    if spread is None:
        noise = min(estimate_noise(curve, list(gaps)) for curve in (a, b))
        limit = LossSpread(mean=NOISE_SHARE * noise, by_step=dict.fromkeys(gaps, NOISE_SHARE * noise), num_seeds=1)
        if mean <= limit.mean and find_divergence(gaps, limit) is None:
            reason = f"they differ by {mean:.2g} on average; the loss of each varies by {noise:.2g} from batch to batch"
            return LossAgreement(is_equal=True, reason=reason, mean_difference=mean)
        reason = f"they differ by {mean:.2g} on average; add seeds: to the matrix to judge that"
        return LossAgreement(is_equal=None, reason=reason, mean_difference=mean)
    numbers = f"{mean:.2g} on average; trainings with {spread.num_seeds} seeds differ by {spread.mean:.2g}"
    start = find_divergence(gaps, spread)
    if start is None and mean <= spread.mean:
        return LossAgreement(is_equal=True, reason=f"they differ by {numbers}", mean_difference=mean)
    place = f" from step {start} on" if start is not None else ""
    return LossAgreement(
        is_equal=False, reason=f"they diverge{place}, by {numbers}", mean_difference=mean, diverges_at=start
    )


def find_divergence(gaps: Mapping[int, float], spread: LossSpread) -> int | None:
    """The step from which differences are larger on average over `WINDOW` steps than any between seeds."""
    steps = [step for step in sorted(gaps) if step in spread.by_step]
    for first in range(len(steps) - WINDOW + 1):
        window = steps[first : first + WINDOW]
        if fmean(gaps[step] for step in window) > fmean(spread.by_step[step] for step in window):
            return next(step for step in window if gaps[step] > spread.by_step[step])
    return None

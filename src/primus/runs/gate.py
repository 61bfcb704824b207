"""Compare the speed and losses of a run with its baseline runs by statistical tests.

`primus.tasks.runs.gate` decides by these verdicts whether the run passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist, fmean, median
from typing import Literal, NamedTuple

from msgspec import Struct, structs

from primus.errors import UsageError
from primus.runs.run_steps import RunSteps, is_rate
from primus.statistics import (
    MAX_CORRELATED,
    Interval,
    bootstrap_ratio,
    clip_outliers,
    compare_series_means,
    compute_excess_probability,
    find_steady_window,
    predict_ratio,
    thin_series,
)

MIN_STEPS = 10
"""Fewest steady steps that are compared."""
MAX_STEP_FACTOR = 100
"""More steps than this many times those of a run are not asked for."""
RUNS_FOR_SPREAD = 3
"""Number of baseline runs from which their spread is estimated; with two, the interval of t is useless."""
LEVEL = 0.95
"""Only slowdowns raise an alarm: one in 40 equal runs by the lower bound of this interval. Stalls hide a part of the
correlation of the steps, and two runs differ by more than their steps show: in simulated runs with both, twice as many
alarms are raised, and the target is one in 20."""
RESAMPLES = 1000
TYPICAL, ALL = "typical step", "all steps"
"""Two means are compared. That of typical steps clips outliers and is the more precise one; that of all steps finds a
stall in every tenth step, which hardly changes the other."""
STALL_LEVEL = 0.995
"""Of the mean of all steps, which adds a quarter of an alarm in 100."""
POWER_REACH = 1 + NormalDist().inv_cdf(0.9) / NormalDist().inv_cdf((1 + LEVEL) / 2)
"""A slowdown of this multiple of the half width of the interval is caught 9 times in 10: the quantiles of the normal
distribution for the alarm and for the power (Cohen, Statistical Power Analysis, 1988, section 2)."""

CONTENDED = 0.05
"""Share of waiting for a core above which other processes may be the cause of a slowdown."""

Verdict = Literal["same", "slower", "faster", "inconclusive"]


class SteadySteps(NamedTuple):
    """Costs of the steps after the warm-up of each attempt."""

    costs: list[float]
    num_warm_up: int
    is_steady: bool


class CostChange(Struct, frozen=True, kw_only=True):
    """Relative change of a cost against the baseline; positive is slower."""

    of: str
    """`typical step` or `all steps`."""
    change: float
    low: float
    high: float
    """Bounds of the interval."""
    chance: float | None = None
    """Probability of such a slowdown by chance in a permutation test; None where the interval decides."""

    def is_slowdown(self, tolerance: float) -> bool:
        """Whether the interval is above 0 and the change more than half of `tolerance`."""
        return self.low > 0 and self.change > tolerance / 2

    def is_chance(self) -> bool:
        """Whether a permutation test finds that equal runs often differ as much."""
        return self.chance is not None and self.chance > (1 - STALL_LEVEL) / 2


class SpeedComparison(Struct, frozen=True, kw_only=True):
    """The speed of a run against its baseline."""

    metric: str
    tolerance: float
    run_value: float
    """Median over the steady steps."""
    baseline_value: float
    changes: list[CostChange]
    verdict: Verdict
    num_steps: int
    """Steady steps of the run."""
    num_warm_up: int
    """Steps before, which are excluded."""
    baseline_steps: list[int]
    """Steady steps of each baseline run."""
    is_steady: bool
    """False if the speed of a run still changes in the second half of its steps."""
    detectable: float
    """Slowdown of the typical step that steps as noisy as these show 9 times in 10."""
    core_wait: float | None = None
    """Share of waiting for a core of a run on CPUs, if other processes may be the cause of its speed."""
    wanted_steps: int | None = None
    """Estimated number of steady steps for an answer, if the verdict is inconclusive and more steps help."""


class LossComparison(Struct, frozen=True, kw_only=True):
    """The losses of a run against a baseline run, step by step."""

    tolerance: float
    """Largest relative difference that is accepted."""
    common_steps: int
    num_above: int
    """Steps above the tolerance."""
    first_above: int | None = None
    largest: float = 0.0
    """Largest relative difference."""
    largest_step: int | None = None
    not_finite: list[int] = []
    """Steps at which only the run's loss is not finite."""

    @property
    def is_equal(self) -> bool:
        """Whether all losses are within the tolerance."""
        return not self.num_above and not self.not_finite


def compare_speed(run: RunSteps, baselines: Sequence[RunSteps], metric: str, tolerance: float) -> SpeedComparison:
    """Test whether the steady steps of `run` are slower.

    The run is slower if, for its typical steps or for all steps, the change is not chance and more than half of
    `tolerance`. Half, because the decision is between no change and a change of
    `tolerance`: both errors are then equally rare. Where the run had to share its cores, a slowdown is inconclusive.

    Raises:
        UsageError: The metric is unknown, or a run has too few steps.
        PrimusError: A value of the metric is missing.
    """
    new = select_steady_steps(run, metric)
    old = [select_steady_steps(baseline, metric) for baseline in baselines]
    changes = [_compare_typical_steps(new, old), _compare_all_steps(new, old, tolerance)]
    typical, overall = changes
    is_contended = (run.core_wait or 0.0) > CONTENDED and not metric.endswith("_gib")
    core_wait = run.core_wait if is_contended else None
    verdict: Verdict = "same"
    if any(change.is_slowdown(tolerance) and not change.is_chance() for change in changes):
        verdict = "inconclusive" if core_wait else "slower"
    elif typical.high > tolerance or overall.change > tolerance:
        verdict = "inconclusive"
    elif typical.high < 0 and typical.change < -tolerance / 2:
        verdict = "faster"
    return SpeedComparison(
        metric=metric,
        tolerance=tolerance,
        run_value=_read_median(run, metric, new),
        baseline_value=median(_read_median(each, metric, steps) for each, steps in zip(baselines, old, strict=True)),
        changes=changes,
        verdict=verdict,
        num_steps=len(new.costs),
        num_warm_up=new.num_warm_up,
        baseline_steps=[len(each.costs) for each in old],
        is_steady=all(each.is_steady for each in (new, *old)),
        detectable=_estimate_detectable(typical),
        core_wait=core_wait,
        wanted_steps=_estimate_wanted_steps(typical if typical.high > tolerance else overall, len(new.costs), tolerance)
        if verdict == "inconclusive" and not core_wait
        else None,
    )


def compare_losses(run: RunSteps, baseline: RunSteps, tolerance: float) -> LossComparison:
    """Compare the losses of the common steps.

    Raises:
        UsageError: The runs trained something else, so that their losses are not comparable, or have no common step.
    """
    for key in ("parameters", "seq_length", "global_batch_size", "data_fingerprint"):
        ours, theirs = run.training.get(key), baseline.training.get(key)
        if ours != theirs:
            raise UsageError(
                f"the losses are not comparable: {key} is {ours} in {run.run}, {theirs} in {baseline.run}",
                "choose a baseline of the same training, or compare speed only: --loss-tolerance off",
            )
    pairs = {
        step: (ours, theirs)
        for (step, ours), theirs in zip(_read_losses(run).items(), _align_losses(run, baseline), strict=True)
        if theirs is not None
    }
    if not pairs:
        raise UsageError(
            f"runs {run.run} and {baseline.run} have no common step with a finite loss in the baseline",
            "choose another baseline, or compare speed only: --loss-tolerance off",
        )
    finite = {step: (ours, theirs) for step, (ours, theirs) in pairs.items() if ours is not None}
    gaps = {step: abs(ours - theirs) / max(abs(ours), abs(theirs), 1e-12) for step, (ours, theirs) in finite.items()}
    above = [step for step, gap in gaps.items() if gap > tolerance]
    largest = max(gaps, key=gaps.__getitem__, default=None)
    return LossComparison(
        tolerance=tolerance,
        common_steps=len(pairs),
        num_above=len(above),
        first_above=above[0] if above else None,
        largest=gaps[largest] if largest is not None else 0.0,
        largest_step=largest,
        not_finite=[step for step, (ours, _) in pairs.items() if ours is None],
    )


def select_steady_steps(run: RunSteps, metric: str) -> SteadySteps:
    """The costs after the warm-up of each attempt; the first step, which may compile, is never among them.

    Raises:
        UsageError: Fewer than `MIN_STEPS` remain.
    """
    attempts = run.read_costs(metric)
    costs: list[float] = []
    is_steady = True
    for attempt in attempts:
        window = find_steady_window(attempt[1:])
        costs += attempt[1 + window.start :]
        is_steady = is_steady and window.is_steady
    num_warm_up = sum(map(len, attempts)) - len(costs)
    if len(costs) < MIN_STEPS:
        raise UsageError(
            f"run {run.run} has {len(costs)} steady steps after {num_warm_up} of warm-up; the gate needs {MIN_STEPS}",
            f"train longer, for example --train_iters {2 * (MIN_STEPS + num_warm_up)}",
        )
    return SteadySteps(costs, num_warm_up, is_steady)


def list_differences(run: RunSteps, baseline: RunSteps) -> list[str]:
    """What differs between two runs besides speed and losses, as text."""
    pairs = [(key, run.training.get(key), baseline.training.get(key)) for key in run.training]
    pairs += [(name, version, baseline.versions.get(name)) for name, version in run.versions.items()]
    return [f"{name}: {theirs} -> {ours}" for name, ours, theirs in pairs if ours != theirs]


def _compare_typical_steps(new: SteadySteps, old: Sequence[SteadySteps]) -> CostChange:
    clipped = [clip_outliers(steps.costs, MAX_CORRELATED) for steps in (new, *old)]
    found = compare_series_means(clipped[0], clipped[1:], level=LEVEL)
    return _build_change(TYPICAL, found, clipped[0], clipped[1:], LEVEL)


def _compare_all_steps(new: SteadySteps, old: Sequence[SteadySteps], tolerance: float) -> CostChange:
    # A few stalls are most of the variance: no model of noise, but resampling.
    samples = [thin_series(costs, fmean) for costs in (new.costs, [cost for steps in old for cost in steps.costs])]
    found = bootstrap_ratio(samples[0], samples[1], fmean, block=None, level=STALL_LEVEL, resamples=RESAMPLES)
    change = _build_change(ALL, found, new.costs, [steps.costs for steps in old], STALL_LEVEL)
    if len(old) >= RUNS_FOR_SPREAD or not change.is_slowdown(tolerance):
        return change
    # Only what stalls add is permuted: correlated noise is a matter of the typical steps, and needs longer blocks than
    # a run has.
    stalls = [_measure_stalls(new.costs), [stall for steps in old for stall in _measure_stalls(steps.costs)]]
    parts = [thin_series(values, fmean) for values in stalls]
    return structs.replace(change, chance=compute_excess_probability(parts[0], parts[1], fmean))


def _measure_stalls(costs: Sequence[float]) -> list[float]:
    """What clipping takes from each step, relative to the typical step."""
    clipped = clip_outliers(costs, MAX_CORRELATED)
    typical = fmean(clipped)
    return [(cost - rest) / typical for cost, rest in zip(costs, clipped, strict=True)]


def _build_change(
    name: str, found: Interval, new: Sequence[float], old: Sequence[Sequence[float]], level: float
) -> CostChange:
    """The change with its interval, which also includes the spread between the baseline runs if that is known."""
    if len(old) < RUNS_FOR_SPREAD:
        return CostChange(of=name, change=found.estimate - 1, low=found.low - 1, high=found.high - 1)
    spread = predict_ratio(fmean(new), [fmean(costs) for costs in old], level=level)
    low, high = min(found.low, spread.low), max(found.high, spread.high)
    return CostChange(of=name, change=spread.estimate - 1, low=low - 1, high=high - 1)


def _estimate_detectable(change: CostChange) -> float:
    return POWER_REACH * (change.high - change.low) / 2


def _estimate_wanted_steps(undecided: CostChange, num_steps: int, tolerance: float) -> int | None:
    """Steps that show a slowdown of the tolerance; what can be shown shrinks with the root of their number.

    None if that is more than `MAX_STEP_FACTOR` times as many: the speed then varies for a reason, not by noise.
    """
    wanted = max(num_steps + 1, round(num_steps * (_estimate_detectable(undecided) / tolerance) ** 2))
    return wanted if wanted <= MAX_STEP_FACTOR * num_steps else None


def _read_median(run: RunSteps, metric: str, steps: SteadySteps) -> float:
    cost = median(steps.costs)
    return 1 / cost if is_rate(metric) else cost


def _read_losses(run: RunSteps) -> dict[int, float | None]:
    return dict(zip(run.steps, run.columns.get("loss", [None] * len(run.steps)), strict=True))


def _align_losses(run: RunSteps, baseline: RunSteps) -> list[float | None]:
    """The baseline's loss at each step of `run`; None where it has none."""
    losses = _read_losses(baseline)
    return [losses.get(step) for step in run.steps]

"""The ratio of two cells whose runs took turns: from the pairs of turns, which met the same machine.

In the time of a few steps, whatever else a machine does changes little. So the ratio of the two turns of a round
varies less than the steps do, and what the machine did between rounds cancels. The ratios of a pair of runs are a
series, whose mean has an error that includes their correlation. Pairs of runs vary by more than that: where a process
got its memory stays for a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct

from primus.comparison.speed.cell_statistics import (
    EXPECTED_WEIGHT,
    RATIO_LEVEL,
    RUNS_FOR_SPREAD,
    SMALLEST_DIFFERENCE,
    USUAL_RUN_SPREAD,
    RatioEstimate,
    count_more_runs,
    find_smallest_difference,
)
from primus.statistics import MAX_CORRELATED, clip_outliers, compute_t_quantile, estimate_series_mean

MIN_TURNS = 10
"""Fewest common turns of a pair of runs."""


class TurnSeries(Struct, frozen=True, kw_only=True):
    """The times of the steps of a run after the warm-up, by turn."""

    group: str
    """Name of the group of runs that took turns with each other."""
    times: dict[int, list[float]]


def group_by_turn(group: str, turns: Mapping[int, int], times: Mapping[int, float]) -> TurnSeries:
    """The steady steps of a run by the turn in which they were taken.

    Args:
        group: See `TurnSeries`.
        turns: Turn of each step.
        times: Time of each steady step.
    """
    found: dict[int, list[float]] = {}
    for step, time in times.items():
        if turns.get(step):
            found.setdefault(turns[step], []).append(time)
    return TurnSeries(group=group, times=found)


def compare_turns(a: Sequence[TurnSeries], b: Sequence[TurnSeries]) -> RatioEstimate | None:
    """How many times as fast `a` is as `b`; None unless every run of both has taken turns with one of the other."""
    partners = {run.group: run for run in b if run.group}
    pairs = [(run, partners[run.group]) for run in a if run.group in partners]
    if not pairs or len(pairs) < max(len(a), len(b)):
        return None
    series = [_list_log_ratios(ours, theirs) for ours, theirs in pairs]
    if min(map(len, series)) < MIN_TURNS:
        return None
    means = [estimate_series_mean(clip_outliers(each, MAX_CORRELATED)) for each in series]
    values = [each.mean for each in means]
    center, freedom = fmean(values), len(values) - 1
    squares = sum((value - center) ** 2 for value in values)
    # As for runs that did not take turns: the spread that was seen, averaged with the one that steps and usual runs
    # give. That of a pair of runs is twice that of a run.
    expected = fmean(each.error**2 for each in means) + 2 * USUAL_RUN_SPREAD**2
    variance = (squares + EXPECTED_WEIGHT * expected) / (freedom + EXPECTED_WEIGHT)
    error, freedom = math.sqrt(variance / len(values)), freedom + EXPECTED_WEIGHT
    reach = compute_t_quantile((1 + RATIO_LEVEL) / 2, freedom) * error
    least = math.log(1 + SMALLEST_DIFFERENCE) if len(values) < RUNS_FOR_SPREAD else 0.0
    return RatioEstimate(
        value=math.exp(center),
        low=math.exp(center - reach),
        high=math.exp(center + reach),
        times=(_average_steps(ours for ours, _ in pairs), _average_steps(theirs for _, theirs in pairs)),
        is_difference=abs(center) > max(least, reach),
        method=f"from {sum(map(len, series))} pairs of turns in {len(values)} runs of each cell",
        smallest_difference=max(math.expm1(least), find_smallest_difference(error, freedom)),
        more_runs=count_more_runs(variance / 2, len(values)),
    )


def _average_steps(runs: Iterable[TurnSeries]) -> float:
    return fmean(
        fmean(clip_outliers([time for times in run.times.values() for time in times], MAX_CORRELATED)) for run in runs
    )


def _list_log_ratios(ours: TurnSeries, theirs: TurnSeries) -> list[float]:
    """The logarithms of the ratio of the mean steps of two runs, in each round that both have whole."""
    common = sorted(ours.times.keys() & theirs.times.keys())
    sizes = max((len(ours.times[turn]) for turn in common), default=0)
    return [
        math.log(fmean(theirs.times[turn]) / fmean(ours.times[turn]))
        for turn in common
        if len(ours.times[turn]) == len(theirs.times[turn]) == sizes
    ]

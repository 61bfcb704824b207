"""Locate slow or faulty members from measurements of pairs, of groups and of single members."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

BELOW_MEDIAN = 0.05
"""Relative distance below the median that counts as an outlier (microsoft/superbenchmark's variance rule; ROCm/cvs uses
the same 5 % for dips over sizes)."""
ROBUST_Z = 3.5
"""Modified z-score beyond which a value is an outlier (Iglewicz and Hoaglin, How to Detect and Handle
Outliers, 1993)."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of normal values in units of their median absolute deviation (the same source)."""

Name = TypeVar("Name", bound=Hashable)


class PairResult(NamedTuple):
    """Result of a measurement between two members of a group."""

    first: Hashable
    second: Hashable
    value: float | None
    """None if the pair failed; otherwise a number, larger is better."""


def find_bad_pairs(
    results: Iterable[PairResult], floor: float | None = None, below: float = BELOW_MEDIAN
) -> list[PairResult]:
    """Results that failed, are below `floor`, or are more than `below` under the usual value.

    The usual value is the median of the better half of the pairs: in a small group one bad member slows down most
    pairs.
    """
    results = list(results)
    values = sorted((result.value for result in results if result.value is not None), reverse=True)
    usual = statistics.median_high(values[: (len(values) + 1) // 2]) if values else 0.0
    least = max(floor or 0.0, usual * (1 - below))
    return [result for result in results if result.value is None or result.value < least]


def find_culprits(results: Iterable[PairResult], bad: Iterable[PairResult]) -> list[Hashable]:
    """The members that explain the bad pairs, the worst first; empty if no pair is bad.

    A member that is bad with several partners, and with more than half of them, is a culprit; any other member is a
    known-good partner. A bad pair of two members that are good with others is a bad link and has no culprit. If
    there is only one pair, either member may be at fault, and both are returned.
    """
    partners = Counter(member for result in results for member in (result.first, result.second))
    left = {(result.first, result.second) for result in bad}
    if max(partners.values(), default=0) == 1:
        return sorted((member for pair in left for member in pair), key=str)
    blamed: list[Hashable] = []
    while left:
        # Greedy: a culprit explains all of its bad pairs, so those are removed before the next one is looked for.
        counts = Counter(member for pair in left for member in pair)
        worst = min(counts, key=lambda member: (-counts[member], str(member)))
        # Pairs with earlier culprits say nothing about this member and are not counted as good.
        good_partners = partners[worst] - len(blamed)
        if counts[worst] < 2 or 2 * counts[worst] <= good_partners:
            break
        blamed.append(worst)
        left = {pair for pair in left if worst not in pair}
    return blamed


class PairOutlier(NamedTuple):
    """Distance of an outlier below the usual value."""

    below: float
    """Relative distance below the median."""
    z: float
    """Modified z-score; infinite if more than half of the values are equal."""


def find_outliers(values: Mapping[Name, float], below: float = BELOW_MEDIAN) -> dict[Name, PairOutlier]:
    """Members whose value is more than `below` under the median, with their distance; empty for fewer than three
    members."""
    if len(values) < 3:
        return {}
    median = statistics.median(values.values())
    sigma = MAD_TO_SIGMA * statistics.median([abs(value - median) for value in values.values()])
    return {
        name: PairOutlier((median - value) / median, (median - value) / sigma if sigma else float("inf"))
        for name, value in values.items()
        if median > 0 and (median - value) / median > below
    }


def find_dips(by_size: Mapping[int, float], drop: float = BELOW_MEDIAN) -> list[tuple[int, int]]:
    """Neighboring sizes where the bandwidth of the larger is lower by more than `drop`."""
    sizes = sorted(by_size)
    return [
        (small, large) for small, large in itertools.pairwise(sizes) if by_size[large] < by_size[small] * (1 - drop)
    ]


def bisect_group(
    group: Sequence[Name], works: Callable[[Sequence[Name]], bool], reference: Sequence[Name] = ()
) -> list[Name]:
    """The smallest set of members that fails together, found by bisection; empty if `group` works.

    Args:
        works: Tests a set of members; returns False also if the test has no result.
        reference: Known-good members, added to each half so that a single member has a partner.
    """
    if works([*reference, *group]):
        return []
    return _find_smallest_group(list(group), lambda some: not works([*reference, *some]), [])


def _find_smallest_group(group: list[Name], fails: Callable[[list[Name]], bool], needed: list[Name]) -> list[Name]:
    """Minimal subset of the failing `group` that fails together with `needed`.

    If neither half fails alone, each half is reduced while the other is kept (Zeller and Hildebrandt,
    Simplifying and Isolating Failure-Inducing Input, 2002).
    """
    # Invariant: `group` and `needed` fail together. Each call of `fails` is a measurement of several seconds on all
    # nodes.
    if len(group) == 1 or (needed and fails(needed)):
        return [] if needed and fails(needed) else group
    middle = len(group) // 2
    first, second = group[:middle], group[middle:]
    if fails([*needed, *first]):
        return _find_smallest_group(first, fails, needed)
    if fails([*needed, *second]):
        return _find_smallest_group(second, fails, needed)
    # The order matters: the second half is reduced against the already reduced first half, which keeps the result
    # minimal.
    from_first = _find_smallest_group(first, fails, [*needed, *second])
    return [*from_first, *_find_smallest_group(second, fails, [*needed, *from_first])]

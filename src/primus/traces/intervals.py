"""Sets of time intervals: arrays [N, 2] of starts and ends, sorted and disjoint, in microseconds."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntervalSet: TypeAlias = NDArray[np.float64]


def merge_intervals(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> IntervalSet:
    """The union of intervals in any order, some of which may overlap, touch or be empty."""
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    if len(starts) == 0:
        return np.empty((0, 2))
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    is_first = np.concatenate(([True], starts[1:] > ends[:-1]))
    is_last = np.concatenate((is_first[1:], [True]))
    return np.stack((starts[is_first], ends[is_last]), axis=1)


def unite_sets(*sets: IntervalSet) -> IntervalSet:
    """Times that are in at least one set."""
    joined = np.concatenate(sets) if sets else np.empty((0, 2))
    return merge_intervals(joined[:, 0], joined[:, 1])


def intersect_sets(a: IntervalSet, b: IntervalSet) -> IntervalSet:
    """Times that are in both sets."""
    if len(a) == 0 or len(b) == 0:
        return np.empty((0, 2))
    # A time is in both where the number of sets that have begun and not ended is two.
    times = np.concatenate((a[:, 0], b[:, 0], a[:, 1], b[:, 1]))
    changes = np.concatenate((np.ones(len(a) + len(b)), -np.ones(len(a) + len(b))))
    order = np.lexsort((changes, times))  # ends before starts of the same time
    times, depth = times[order], np.cumsum(changes[order])
    inside = np.flatnonzero(depth[:-1] == 2)
    return merge_intervals(times[inside], times[inside + 1])


def subtract_set(a: IntervalSet, b: IntervalSet) -> IntervalSet:
    """Times that are in `a` and not in `b`."""
    if len(a) == 0 or len(b) == 0:
        return a
    low, high = min(a[0, 0], b[0, 0]), max(a[-1, 1], b[-1, 1])
    gaps = np.stack((np.concatenate(([low], b[:, 1])), np.concatenate((b[:, 0], [high]))), axis=1)
    return intersect_sets(a, merge_intervals(gaps[:, 0], gaps[:, 1]))


def find_gaps(intervals: IntervalSet) -> IntervalSet:
    """The times between the intervals of a set."""
    return np.stack((intervals[:-1, 1], intervals[1:, 0]), axis=1) if len(intervals) > 1 else np.empty((0, 2))


def measure_set(intervals: IntervalSet) -> float:
    """Length of all intervals together."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())

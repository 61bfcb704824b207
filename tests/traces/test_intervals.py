"""Interval arithmetic agrees with counting single ticks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy")

from primus.traces import intervals  # noqa: E402 - needs numpy

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=14)


def merge(pairs: list[tuple[int, int]]) -> intervals.IntervalSet:
    starts = np.array([start for start, _ in pairs], float)
    return intervals.merge_intervals(starts, starts + np.array([length for _, length in pairs], float))


def list_ticks(pairs: list[tuple[int, int]]) -> set[int]:
    return {tick for start, length in pairs for tick in range(start, start + length)}


def list_set_ticks(found: intervals.IntervalSet) -> set[int]:
    assert all(start < end for start, end in found), "no interval is empty"
    assert all(found[i, 1] < found[i + 1, 0] for i in range(len(found) - 1)), "sorted, and apart"
    return {tick for start, end in found.tolist() for tick in range(int(start), int(end))}


@given(PAIRS, PAIRS)
def test_sets_of_intervals_agree_with_sets_of_ticks(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    ours, theirs = merge(a), merge(b)
    assert list_set_ticks(ours) == list_ticks(a)
    assert list_set_ticks(intervals.unite_sets(ours, theirs)) == list_ticks(a) | list_ticks(b)
    assert list_set_ticks(intervals.intersect_sets(ours, theirs)) == list_ticks(a) & list_ticks(b)
    assert list_set_ticks(intervals.subtract_set(ours, theirs)) == list_ticks(a) - list_ticks(b)
    assert intervals.measure_set(ours) == len(list_ticks(a))

"""Schedules of pairs are complete, and who is slow or broken is named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.machine.measurements import list_pair_rounds
from primus.preflight.performance import fault_localization
from primus.preflight.performance.fault_localization import PairResult


@pytest.mark.parametrize("n", range(1, 34))
def test_each_two_meet_once_and_nobody_is_in_two_pairs_of_a_round(n: int) -> None:
    found = list_pair_rounds(n)
    met = [pair for meeting in found for pair in meeting]
    assert sorted(met) == list(itertools.combinations(range(n), 2))
    for meeting in found:
        members = list(itertools.chain(*meeting))
        assert len(members) == len(set(members)) == n - n % 2
    assert len(found) == (0 if n == 1 else n - 1 + n % 2)


def scan(n: int, bad: set[int], usual: float = 100.0, slow: float = 50.0) -> list[PairResult]:
    """All pairs of n members of which some are slow."""
    return [PairResult(a, b, slow if {a, b} & bad else usual) for a, b in itertools.combinations(range(n), 2)]


def blamed(results: Sequence[PairResult]) -> list[object]:
    return fault_localization.find_culprits(results, fault_localization.find_bad_pairs(results))


@given(st.integers(3, 12), st.data())
def test_the_one_slow_member_is_named_whoever_it_is(n: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, n - 1))
    assert blamed(scan(n, {bad})) == [bad]


@given(st.integers(8, 16), st.data())
def test_several_slow_members_are_named(n: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n // 4))
    assert set(blamed(scan(n, bad))) == bad


@pytest.mark.parametrize("n", range(1, 10))
def test_healthy_nodes_blame_nobody_in_any_number(n: int) -> None:
    assert blamed(scan(n, set())) == []


def test_one_bad_link_blames_nobody() -> None:
    results = [PairResult(a, b, 10.0 if (a, b) == (1, 4) else 100.0) for a, b in itertools.combinations(range(6), 2)]
    assert fault_localization.find_bad_pairs(results) == [PairResult(1, 4, 10.0)]
    assert blamed(results) == []


def test_of_a_single_pair_both_are_named() -> None:
    assert blamed([PairResult("a", "b", None)]) == ["a", "b"]


def test_a_pair_without_a_figure_is_bad_and_all_failed_is_not_healthy() -> None:
    results = [PairResult(a, b, None) for a, b in itertools.combinations(range(4), 2)]
    assert len(fault_localization.find_bad_pairs(results)) == 6
    assert blamed(results)


def test_a_floor_counts_where_all_are_equally_slow() -> None:
    results = scan(4, set(), usual=80.0)
    assert fault_localization.find_bad_pairs(results) == []
    assert len(fault_localization.find_bad_pairs(results, floor=90.0)) == 6


def test_an_outlier_is_more_than_five_per_cent_below_the_median() -> None:
    values = {"a": 100.0, "b": 101.0, "c": 99.0, "d": 94.9, "e": 95.1, "f": 130.0, "g": 100.0}
    found = fault_localization.find_outliers(values)
    assert list(found) == ["d"]
    assert found["d"].below == pytest.approx(0.051)
    assert found["d"].z == pytest.approx(5.1 / (1.4826 * 1.0))


def test_two_devices_have_no_outlier() -> None:
    assert fault_localization.find_outliers({"a": 1.0, "b": 100.0}) == {}


def test_equal_devices_make_an_outlier_infinitely_far() -> None:
    assert fault_localization.find_outliers({"a": 10.0, "b": 10.0, "c": 10.0, "d": 5.0})["d"].z == float("inf")


def test_a_dip_is_a_drop_of_more_than_five_per_cent_to_the_next_size() -> None:
    assert fault_localization.find_dips({8: 1.0, 16: 2.0, 32: 1.91, 64: 1.80}) == [(32, 64)]


@given(st.integers(1, 33), st.data())
def test_bisecting_finds_the_smallest_set_that_fails_together(n: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, n - 1), max_size=3))
    tries = 0

    def works(some: Sequence[int]) -> bool:
        nonlocal tries
        tries += 1
        assert some[0] == -1
        return not guilty or not guilty <= set(some)

    assert set(fault_localization.bisect_group(range(n), works, reference=[-1])) == guilty
    assert tries <= 6 + 12 * n.bit_length()


def test_bisecting_finds_one_of_several_that_fail_alone() -> None:
    found = fault_localization.bisect_group(range(9), lambda some: not {2, 7} & set(some))
    assert found in ([2], [7])

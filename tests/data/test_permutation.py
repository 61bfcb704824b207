from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from primus.data.permutation import LARGEST_STORED, create_permutation, mix_numbers, permute_position

SIGMAS = 5.0
"""Standard deviations that a statistic of a uniform order exceeds about once in two million tests."""


def keys(count: int, salt: int) -> list[int]:
    return [mix_numbers(salt, number) for number in range(count)]


def computed_alone(size: int, key: int) -> NDArray[np.int64]:
    return np.array([permute_position(position, size, key) for position in range(size)])


def is_odd(order: NDArray[np.int64]) -> bool:
    seen, cycles = np.zeros(len(order), bool), 0
    for start in range(len(order)):
        if not seen[start]:
            cycles += 1
            while not seen[start]:
                seen[start] = True
                start = int(order[start])
    return (len(order) - cycles) % 2 == 1


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_every_element_comes_once_and_each_point_can_be_asked_alone(size: int, key: int) -> None:
    order = create_permutation(size, key)
    assert sorted(order) == list(range(size))
    assert [permute_position(position, size, key) for position in range(size)] == order.tolist()


@pytest.mark.parametrize("size", [LARGEST_STORED - 1, LARGEST_STORED, LARGEST_STORED + 1, LARGEST_STORED + 257, 70_000])
def test_every_element_comes_once_where_points_begin_to_be_computed(size: int) -> None:
    assert np.array_equal(np.sort(computed_alone(size, 3)), np.arange(size))
    assert np.array_equal(np.sort(create_permutation(size, 3)), np.arange(size))


@pytest.mark.parametrize("size", range(2, 8))
def test_every_order_of_few_elements_is_as_frequent(size: int) -> None:
    orders = list(permutations(range(size)))
    draws = 40 * len(orders) if size == 7 else 100 * len(orders)
    counts = Counter(tuple(create_permutation(size, key).tolist()) for key in keys(draws, size))
    expected = draws / len(orders)
    chi_squared = sum((counts[order] - expected) ** 2 for order in orders) / expected
    freedom = len(orders) - 1
    assert abs(chi_squared - freedom) < SIGMAS * np.sqrt(2 * freedom) + SIGMAS  # the tail of few degrees is longer


@pytest.mark.parametrize(("size", "draws"), [(16, 4000), (64, 1000), (1024, 400), (LARGEST_STORED, 60)])
def test_half_of_the_orders_are_odd(size: int, draws: int) -> None:
    odd = sum(is_odd(create_permutation(size, key)) for key in keys(draws, size))
    assert abs(odd - draws / 2) < SIGMAS * np.sqrt(draws) / 2


def test_orders_that_are_computed_may_be_odd() -> None:
    assert any(is_odd(computed_alone(1 << 18, key)) for key in keys(3, 18))  # unlike a bit network


@pytest.mark.parametrize(
    ("size", "draws"),
    [(16, 20_000), (64, 8000), (1000, 1000), (LARGEST_STORED - 1, 20), (LARGEST_STORED + 1, 20), (1_000_000, 4)],
)
def test_neighbors_stay_neighbors_as_seldom_as_in_a_uniform_order(size: int, draws: int) -> None:
    together = [int((np.diff(create_permutation(size, key)) == 1).sum()) for key in keys(draws, size)]
    expected = draws * (size - 1) / size  # of each of the n - 1 pairs with a probability of 1 / n
    assert abs(sum(together) - expected) < SIGMAS * np.sqrt(expected)


def test_neighbors_that_are_computed_stay_neighbors_as_seldom() -> None:
    size = LARGEST_STORED + 1
    together = [int((np.diff(computed_alone(size, key)) == 1).sum()) for key in keys(4, size)]
    assert abs(sum(together) - 4) < SIGMAS * 2


@pytest.mark.parametrize("size", [1000, LARGEST_STORED - 1, LARGEST_STORED + 1, 1_000_003])
def test_each_element_is_as_likely_at_each_place(size: int) -> None:
    places, cells = 64, 16
    table = np.zeros((places, cells))
    for key in keys(200, size):
        for place in range(places):
            table[place, permute_position(place * size // places, size, key) * cells // size] += 1
    expected = 200 / cells
    chi_squared, freedom = float(((table - expected) ** 2).sum() / expected), places * (cells - 1)
    assert abs(chi_squared - freedom) < SIGMAS * np.sqrt(2 * freedom)


def test_points_of_a_huge_range_are_spread_evenly() -> None:
    size = 10**12 + 39
    values = np.array([permute_position(position, size, 5) for position in range(50_000)], dtype=float)
    assert len(set(values.tolist())) == 50_000
    counts, _ = np.histogram(values, bins=100, range=(0, size))
    assert abs(float(((counts - 500) ** 2).sum()) / 500 - 99) < SIGMAS * np.sqrt(2 * 99)
    assert np.abs(np.diff(values)).mean() == pytest.approx(size / 3, rel=0.02)


def test_neighbors_are_as_far_apart_as_in_a_random_order() -> None:
    size = 100_000
    distance = np.abs(np.diff(create_permutation(size, key=5))).mean()
    assert distance == pytest.approx(size / 3, rel=0.02)  # expectation of a uniform order: (n + 1) / 3


def test_keys_give_different_orders() -> None:
    fixed_points = [int((create_permutation(1000, key) == np.arange(1000)).sum()) for key in range(50)]
    assert np.mean(fixed_points) < 3  # expectation of a uniform order: 1
    assert len({create_permutation(1000, key).tobytes() for key in range(50)}) == 50


def test_the_order_of_a_seed_never_changes() -> None:
    assert mix_numbers(1234, 0) == 11391823781456656621
    assert create_permutation(10, 7).tolist() == [9, 1, 5, 6, 0, 7, 4, 8, 3, 2]
    assert [permute_position(position, 10**6, 7) for position in range(4)] == [840971, 480661, 958789, 958168]


def test_the_largest_stored_order_is_that_of_the_permutation() -> None:
    order = create_permutation(LARGEST_STORED, 7)
    positions = (0, 1, LARGEST_STORED - 1)
    assert [permute_position(position, LARGEST_STORED, 7) for position in positions] == order[[*positions]].tolist()

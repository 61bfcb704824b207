from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.loading.permutation import mix, permutation, permute


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
def test_every_element_comes_once_and_each_point_can_be_asked_alone(size: int, key: int) -> None:
    order = permutation(size, key)
    assert sorted(order) == list(range(size))
    assert [permute(position, size, key) for position in range(size)] == order.tolist()


def test_neighbours_are_as_far_apart_as_in_a_random_order() -> None:
    size = 100_000
    distance = np.abs(np.diff(permutation(size, key=5))).mean()
    assert distance == pytest.approx(size / 3, rel=0.02)  # expectation of a uniform order: (n + 1) / 3


def test_keys_give_different_orders() -> None:
    fixed_points = [int((permutation(1000, key) == np.arange(1000)).sum()) for key in range(50)]
    assert np.mean(fixed_points) < 3  # expectation of a uniform order: 1
    assert len({permutation(1000, key).tobytes() for key in range(50)}) == 50


def test_the_order_of_a_seed_never_changes() -> None:
    assert permutation(10, mix(1234, 0)).tolist() == [int(permute(i, 10, mix(1234, 0))) for i in range(10)]
    assert mix(1234, 0) == 11391823781456656621
    assert permutation(10, 7).tolist() == [2, 0, 3, 9, 6, 1, 8, 5, 4, 7]

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from primus.data.training.loader import Batches, BatchShape, list_samples_of_step, num_micro_batches
from primus.data.training.packing import Piece, TokenFileProgress
from primus.errors import PrimusError, UsageError


class Numbers:
    """Sample i is [i, i]."""

    samples_per_epoch = 100

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return np.array([index, index], dtype=np.int64)

    def pieces(self, index: int) -> list[Piece]:
        return []

    def progress(self, num_samples: int) -> list[TokenFileProgress]:
        return []


def step_numbers(batches: Batches) -> list[list[int]]:
    return [micro[:, 0].tolist() for micro in next(batches)]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_step_is_the_next_samples_in_micro_batches(num_workers: int) -> None:
    with Batches(Numbers(), BatchShape(6, 2), num_workers=num_workers) as batches:
        assert [step_numbers(batches) for _ in range(3)] == [
            [[0, 1], [2, 3], [4, 5]],
            [[6, 7], [8, 9], [10, 11]],
            [[12, 13], [14, 15], [16, 17]],
        ]
        assert batches.consumed_samples == 18


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_share_the_same_samples_whatever_their_number(world_size: int) -> None:
    for consumed in (0, 16, 160):
        seen = []
        for rank in range(world_size):
            with Batches(Numbers(), BatchShape(16, 2, rank, world_size), consumed) as batches:
                seen += [number for micro in step_numbers(batches) for number in micro]
        assert sorted(seen) == list(range(consumed, consumed + 16))


def test_the_number_of_consumed_samples_is_all_it_takes_to_continue() -> None:
    with Batches(Numbers(), BatchShape(4, 4)) as batches:
        undisturbed = [step_numbers(batches) for _ in range(10)]
    with Batches(Numbers(), BatchShape(4, 4)) as batches:
        before = [step_numbers(batches) for _ in range(3)]
        consumed = batches.consumed_samples
    with Batches(Numbers(), BatchShape(4, 4), consumed_samples=consumed) as batches:
        assert before + [step_numbers(batches) for _ in range(7)] == undisturbed


def test_a_batch_that_does_not_divide_is_an_error_with_the_nearest_that_do() -> None:
    with pytest.raises(UsageError, match=r"global_batch_size 10 does not divide .* of 2 on 4 data-parallel") as caught:
        num_micro_batches(10, 2, 4)
    assert "8 or 16" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        num_micro_batches(3, 2, 4)
    assert caught.value.hint.endswith(": 8")


def test_an_error_of_a_thread_reaches_the_step() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> NDArray[np.int64]:
            if index == 5:
                raise PrimusError("sample 5 is broken")
            return super().__getitem__(index)

    with Batches(Broken(), BatchShape(2, 2), num_workers=2) as batches:
        next(batches)
        next(batches)
        with pytest.raises(PrimusError, match="sample 5"):
            next(batches)


def test_threads_read_ahead_within_a_bound() -> None:
    asked: list[int] = []
    enough = threading.Event()

    class Counting(Numbers):
        def __getitem__(self, index: int) -> NDArray[np.int64]:
            asked.append(index)
            if index == 11:
                enough.set()
            return super().__getitem__(index)

    with Batches(Counting(), BatchShape(4, 4), num_workers=2) as batches:
        next(batches)
        assert enough.wait(timeout=10)
    assert max(asked) == 11


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    batches = Batches(Numbers(), BatchShape(4, 4), num_workers=3)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_the_samples_of_a_step_are_those_that_the_batches_give() -> None:
    with Batches(Numbers(), BatchShape(6, 2)) as batches:
        for step in range(1, 5):
            given = [number for micro in step_numbers(batches) for number in micro]
            assert given == list(list_samples_of_step(step, 6))

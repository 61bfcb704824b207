from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.training.blending import BlendedDataset
from primus.data.training.packing import Piece, TokenFileProgress
from primus.errors import UsageError


class Numbers:
    """Sample i is [tag, i]."""

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self.samples_per_epoch = 1000 + tag

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array([self.tag, index])

    def find_pieces(self, index: int) -> list[Piece]:
        return [Piece(Path(str(self.tag)), index, 0, 1)]

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        return [TokenFileProgress(Path(str(self.tag)), num_samples, num_samples / 1000)]


def blend_of(weights: list[float]) -> BlendedDataset:
    return BlendedDataset([Numbers(tag) for tag in range(len(weights))], weights)


WEIGHTS = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=30)


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1, 2**17], [7]])
def test_each_dataset_is_read_in_its_own_order(weights: list[float]) -> None:
    blend = blend_of(weights)
    taken = [0] * len(weights)
    for index in range(140_000):
        if index % 10_007 == 0:
            assert blend.count_samples(index) == taken
        owner, number = blend.locate_sample(index)
        assert number == taken[owner]
        taken[owner] += 1
    assert blend[3].tolist() == list(blend.locate_sample(3))
    assert blend.find_pieces(3) == blend.datasets[blend.locate_sample(3)[0]].find_pieces(blend.locate_sample(3)[1])


@given(weights=WEIGHTS, count=st.integers(0, 2**50))
@settings(max_examples=300)
def test_every_beginning_of_the_stream_has_the_proportions(weights: list[float], count: int) -> None:
    counts = blend_of(weights).count_samples(count)
    assert sum(counts) == count
    for weight, found in zip(weights, counts, strict=True):
        assert abs(found - weight / math.fsum(weights) * count) <= math.log2(count + 1) + 2 + count * 1e-12


@given(weights=WEIGHTS, index=st.integers(0, 2**50))
@settings(max_examples=50, deadline=None)
def test_a_sample_is_the_one_by_which_the_counts_differ(weights: list[float], index: int) -> None:
    blend = blend_of(weights)
    before, after = blend.count_samples(index), blend.count_samples(index + 1)
    owner, number = blend.locate_sample(index)
    assert [end - start for start, end in zip(before, after, strict=True)] == [
        int(dataset == owner) for dataset in range(len(weights))
    ]
    assert number == before[owner]


def test_the_order_of_a_blend_never_changes() -> None:
    blend = blend_of([0.5, 0.3, 0.2])
    assert [blend.locate_sample(index)[0] for index in range(16)] == [0, 1, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2]
    assert blend.locate_sample(10**12) == (0, 5 * 10**11)


def test_progress_tells_how_often_each_file_has_been_seen() -> None:
    progress = blend_of([3, 1]).compute_progress(4000)
    assert [(str(part.prefix), part.samples, part.epochs) for part in progress] == [("0", 3000, 3.0), ("1", 1000, 1.0)]


def test_an_epoch_of_a_blend_is_an_epoch_of_each_dataset() -> None:
    assert blend_of([8, 1, 1]).samples_per_epoch == 1000 + 1001 + 1002


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -0.5], [math.nan, 1.0], [math.inf, 1.0], [1e-30, 1e30]])
def test_weights_that_make_no_sense_are_an_error(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="weights of a blend"):
        blend_of(weights)

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from primus.data.training.infilling import InfilledDataset, Infilling, rearrange_documents
from primus.data.training.mock import MockDataset

EOD, PREFIX, MIDDLE, SUFFIX = 0, 1001, 1002, 1003


def infilling(rate: float = 1.0, spm_rate: float = 0.5) -> Infilling:
    return Infilling(rate, spm_rate, PREFIX, MIDDLE, SUFFIX, EOD)


def split(tokens: NDArray[np.int64]) -> list[list[int]]:
    """Documents of a sample, without their ends."""
    documents: list[list[int]] = [[]]
    for token in tokens.tolist():
        if token == EOD:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents


def restored(document: list[int]) -> list[int]:
    """The text of a rearranged document, in the order in which it was written."""
    suffix_at, middle_at = document.index(SUFFIX), document.index(MIDDLE)
    assert document[0] == PREFIX
    suffix, rest = document[suffix_at + 1 : middle_at], document[middle_at + 1 :]
    return document[1:suffix_at] + rest + suffix


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    seed=st.integers(0, 2**32),
    rate=st.sampled_from([0.3, 1.0]),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_document_keeps_its_place_length_and_text(tokens: list[int], seed: int, rate: float, spm_rate: float) -> None:
    sample = np.array(tokens)
    made = rearrange_documents(sample, infilling(rate, spm_rate), np.random.default_rng(seed))
    assert np.array_equal(made == EOD, sample == EOD)
    for before, after in zip(split(sample), split(made), strict=True):
        if PREFIX in after:
            assert restored(after) == before[:-3] != [], "a document of three tokens has no room for a text"
            assert Counter(after)[MIDDLE] == Counter(after)[SUFFIX] == Counter(after)[PREFIX] == 1
        else:
            assert after == before
            assert rate < 1 or len(before) <= 3
    assert sample.tolist() == tokens


def test_both_orders_come_as_often_as_asked() -> None:
    rng = np.random.default_rng(0)
    sample = np.tile(np.array([*range(5, 205), EOD]), 4000)
    documents = split(rearrange_documents(sample, infilling(0.5, 0.25), rng))[:-1]
    made = [document for document in documents if document[0] == PREFIX]
    assert abs(len(made) / len(documents) - 0.5) < 0.03
    suffix_first = [document for document in made if document[1] == SUFFIX]
    assert abs(len(suffix_first) / len(made) - 0.25) < 0.04  # an empty prefix looks alike


def test_a_sample_depends_on_seed_and_number_only() -> None:
    plain = MockDataset(50, 200, seed=1)
    one, again, other = (InfilledDataset(plain, infilling(), seed) for seed in (1, 1, 2))
    samples = [one[index].tolist() for index in range(10)]
    assert [again[index].tolist() for index in reversed(range(10))] == samples[::-1]
    assert all(other[index].tolist() != samples[index] for index in range(10))
    places = {tuple(np.flatnonzero(np.array(sample) == MIDDLE)) for sample in samples}
    assert len(places) > 5, "each sample is cut elsewhere"
    assert (
        one.samples_per_epoch == plain.samples_per_epoch and one.find_pieces(3) == [] and one.compute_progress(3) == []
    )


def test_the_arrangement_never_changes() -> None:
    made = InfilledDataset(MockDataset(50, 12, seed=1), infilling(), seed=1)[0]
    assert made.tolist() == [1001, 1003, 1002, 41, 32, 37, 3, 14, 17, 23, 14, 45, 27]

"""Fill-in-the-middle: rearranges documents so that a model learns to write the text between two others.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (arXiv 2207.14255); the two
orders and the names of the settings are those of Megatron-LM's GPTFIMDataset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from primus.data.permutation import mix_numbers
from primus.data.training.packing import Dataset, Piece, TokenFileProgress

MARKERS = 3
"""Number of marker tokens in a rearranged document."""

INFILLING_KEY = 0x46494D
"""Separates the random numbers of this module from others of the same seed."""


@dataclass(frozen=True)
class Infilling:
    """Settings of fill-in-the-middle."""

    rate: float
    """Share of documents that are rearranged."""
    spm_rate: float
    """Share of the rearranged documents in which the suffix precedes the prefix."""
    prefix_id: int
    """Token before the prefix."""
    middle_id: int
    """Token before the middle."""
    suffix_id: int
    """Token before the suffix."""
    eod_id: int
    """End-of-document token."""


class InfilledDataset:
    """Rearranges some documents in the samples of another dataset, as a function of the seed and the sample.

    The part of a document in a sample keeps its place and length: the markers replace its last three tokens. The
    end-of-document tokens stay at their positions.

    Args:
        dataset: Dataset of the samples.
        infilling: How documents are rearranged.
        seed: Seed for the choice of documents and of the cuts.
    """

    def __init__(self, dataset: Dataset, infilling: Infilling, seed: int) -> None:
        self.dataset, self.infilling, self.seed = dataset, infilling, seed
        self.samples_per_epoch = dataset.samples_per_epoch

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        # A generator for each sample, keyed by its number: samples may be read in any order, and a resumed run reads
        # the same.
        random = np.random.Generator(np.random.Philox(key=mix_numbers(self.seed, INFILLING_KEY, index)))
        return rearrange_documents(self.dataset[index], self.infilling, random)

    def find_pieces(self, index: int) -> list[Piece]:
        """Where the S + 1 tokens of a sample come from, in the order before rearrangement."""
        return self.dataset.find_pieces(index)

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """Progress in each token file after the first `num_samples`."""
        return self.dataset.compute_progress(num_samples)


def rearrange_documents(
    tokens: NDArray[np.int64], infilling: Infilling, random: np.random.Generator
) -> NDArray[np.int64]:
    """Copy `tokens`, with some documents in the order prefix, suffix, middle, or suffix, prefix, middle."""
    out = tokens.copy()
    ends = [*np.flatnonzero(tokens == infilling.eod_id).tolist(), len(tokens)]
    # Four numbers for every document, also for those that stay: the numbers of a document do not depend on the others.
    drawn = random.random((len(ends), 4))
    start = 0
    for end, (chosen, order, one, other) in zip(ends, drawn.tolist(), strict=True):
        # The markers replace the last tokens of the document, so that the sample keeps its length. A document needs at
        # least one token more.
        kept = end - start - MARKERS
        if chosen < infilling.rate and kept > 0:
            # Two uniform cuts, either of which may be at an end: prefix, middle or suffix may be empty.
            cuts = sorted((start + int(one * (kept + 1)), start + int(other * (kept + 1))))
            parts = tokens[start : cuts[0]], tokens[cuts[0] : cuts[1]], tokens[cuts[1] : start + kept]
            out[start:end] = _join_parts(*parts, infilling, order < infilling.spm_rate)
        start = end + 1
    return out


def _join_parts(
    prefix: NDArray[np.int64],
    middle: NDArray[np.int64],
    suffix: NDArray[np.int64],
    infilling: Infilling,
    suffix_first: bool,
) -> NDArray[np.int64]:
    before, between, after = [infilling.prefix_id], [infilling.middle_id], [infilling.suffix_id]
    if suffix_first:
        return np.concatenate((before, after, suffix, between, prefix, middle))
    return np.concatenate((before, prefix, after, suffix, between, middle))

"""Blends samples of several datasets in exact proportions, computed from the number of the sample alone.

The van der Corput sequence mirrors the binary number n at the binary point. Each dataset has a share of [0, 1), and
sample n belongs to the dataset in whose share the mirrored number falls. The sequence is spread evenly: after any n
samples, each dataset has had its weight x n samples, up to about log2(n). The exact number is a sum over the bits of n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.data.training.packing import Dataset, Piece, TokenFileProgress
from primus.errors import UsageError

BITS = 64
"""Binary places of the borders of shares."""

STRETCH_BITS = 16
STRETCH = 1 << STRETCH_BITS
"""Consecutive samples whose datasets are computed together."""


class Stretch(NamedTuple):
    """The datasets of `STRETCH` consecutive samples."""

    owner: NDArray[np.int32]
    """Dataset of each sample."""
    rank: NDArray[np.int64]
    """Number of each sample in its dataset."""


class BlendedDataset:
    """Samples of several datasets in fixed proportions, spread evenly; each dataset is read in its own order.

    Args:
        datasets: Datasets to blend.
        weights: Positive weight of each dataset, in any unit.

    Raises:
        UsageError: A weight is not a number above 0.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        self.datasets = datasets
        self._borders = _compute_borders(weights)
        self._stretch = lru_cache(maxsize=2)(self._lay_out)
        self.samples_per_epoch = sum(dataset.samples_per_epoch for dataset in datasets)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        owner, number = self.locate_sample(index)
        return self.datasets[owner][number]

    def find_pieces(self, index: int) -> list[Piece]:
        """Where the S + 1 tokens of a sample come from, in their order."""
        owner, number = self.locate_sample(index)
        return self.datasets[owner].find_pieces(number)

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """Progress in each token file after the first `num_samples`."""
        counts = zip(self.datasets, self.count_samples(num_samples), strict=True)
        return [progress for dataset, count in counts for progress in dataset.compute_progress(count)]

    def locate_sample(self, index: int) -> tuple[int, int]:
        """Dataset of a sample, and the number of the sample in it."""
        if index < 0:
            raise IndexError(index)
        number, slot = divmod(index, STRETCH)
        stretch = self._stretch(number)
        return int(stretch.owner[slot]), int(stretch.rank[slot])

    def count_samples(self, num_samples: int) -> list[int]:
        """Samples of each dataset among the first `num_samples`."""
        below = [_count_below(num_samples, border) for border in self._borders]
        return [end - start for start, end in pairwise(below)]

    def _lay_out(self, number: int) -> Stretch:
        high = int(f"{number:0{BITS - STRETCH_BITS}b}"[::-1], 2)  # mirrored, these are the low places
        mirrored = (_build_mirrored_slots() << np.uint64(BITS - STRETCH_BITS)) | np.uint64(high)
        # Without 0 and 2 ** BITS: the latter does not fit into uint64, and neither separates two datasets.
        inner = np.array(self._borders[1:-1], dtype=np.uint64)
        owner = np.searchsorted(inner, mirrored, side="right").astype(np.int32)
        rank = np.empty(STRETCH, dtype=np.int64)
        # Ranks continue from the exact count before the stretch, so that a stretch needs no earlier one.
        for dataset, before in enumerate(self.count_samples(number * STRETCH)):
            own = np.flatnonzero(owner == dataset)
            rank[own] = np.arange(before, before + len(own))
        return Stretch(owner, rank)


def _compute_borders(weights: Sequence[float]) -> list[int]:
    """Border of each dataset's share of [0, 1), and the end, in units of 2 to the -BITS."""
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        found = ", ".join(str(weight) for weight in weights)
        raise UsageError(f"the weights of a blend are {found}", "every weight must be a number above 0")
    # Fractions are exact: the borders do not depend on the order of floating-point operations.
    ends = list(accumulate(Fraction(weight) for weight in weights))
    borders = [0, *(int(end / ends[-1] * 2**BITS) for end in ends)]
    if any(end == start for start, end in pairwise(borders)):
        raise UsageError(
            "the weights of a blend differ by a factor of more than 2^64", "leave the smallest dataset out"
        )
    return borders


def _count_below(count: int, border: int) -> int:
    """Number of mirrored numbers of 0 .. count - 1 that are below `border`.

    Each set bit k of `count` represents 2^k numbers with the same high bits, which are evenly spaced when mirrored.
    """
    total = 0
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            fixed = count >> (bit + 1) << (bit + 1)
            offset = int(f"{fixed:0{BITS}b}"[::-1], 2)
            spacing = 1 << (BITS - bit)
            # Numbers at offset + j * spacing below the border: the quotient rounded up, from 0 to 2^k.
            total += min(max(-((offset - border) // spacing), 0), 1 << bit)
    return total


@lru_cache(maxsize=1)
def _build_mirrored_slots() -> NDArray[np.uint64]:
    slots = np.arange(STRETCH, dtype=np.uint64)
    mirrored = np.zeros(STRETCH, dtype=np.uint64)
    for bit in range(STRETCH_BITS):
        mirrored |= (slots >> np.uint64(bit) & np.uint64(1)) << np.uint64(STRETCH_BITS - 1 - bit)
    return mirrored

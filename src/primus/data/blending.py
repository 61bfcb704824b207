"""Samples of several datasets in fixed proportions, computed from the number of the sample alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus.data.packing import Dataset, Piece
from primus.errors import UsageError

PERIOD_BITS = 16
PERIOD = 1 << PERIOD_BITS
"""Samples after which the pattern of a blend repeats; a weight is kept to 1 / PERIOD."""


class BlendedDataset:
    """Samples of several datasets in fixed proportions, spread evenly; each dataset is read in its own order.

    Args:
        datasets: What to blend.
        weights: Share of each, in any unit; every one positive.

    Raises:
        UsageError: A weight is not a positive number, or less than 1 / PERIOD of all.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        self.datasets = datasets
        self._quotas = quotas(weights)
        self._owner, self._rank = _spread(self._quotas)
        self.samples_per_epoch = sum(dataset.samples_per_epoch for dataset in datasets)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        owner, position = self.locate(index)
        return self.datasets[owner][position]

    def pieces(self, index: int) -> list[Piece]:
        """Where the S + 1 tokens of a sample come from, in their order."""
        owner, position = self.locate(index)
        return self.datasets[owner].pieces(position)

    def locate(self, index: int) -> tuple[int, int]:
        """Which dataset a sample is of, and its number there."""
        if index < 0:
            raise IndexError(index)
        period, slot = divmod(index, PERIOD)
        owner = int(self._owner[slot])
        return owner, period * self._quotas[owner] + int(self._rank[slot])

    def counts(self, num_samples: int) -> list[int]:
        """Samples of each dataset among the first `num_samples`."""
        periods, slots = divmod(num_samples, PERIOD)
        within = np.bincount(self._owner[:slots], minlength=len(self._quotas)).tolist()
        return [periods * quota + count for quota, count in zip(self._quotas, within, strict=True)]


def quotas(weights: Sequence[float]) -> list[int]:
    """Samples of each dataset in a period, in proportion to the weights, by largest remainder.

    Raises:
        UsageError: A weight is not a positive number, or less than 1 / PERIOD of all.
    """
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise UsageError(
            f"the weights of a blend are {', '.join(map(str, weights))}", "every weight must be a number above 0"
        )
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    whole = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: whole[index] - exact[index])
    for index in by_remainder[: PERIOD - sum(whole)]:
        whole[index] += 1
    if min(whole) < 1:
        raise UsageError(f"a share of less than 1 / {PERIOD} in a blend", "leave that dataset out or raise its weight")
    return whole


def _spread(quotas: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Dataset of each slot of a period, and the slot's number among those of its dataset.

    Slots are taken in bit-reversed order (the van der Corput sequence), which keeps every stretch close to the shares.
    """
    slots: NDArray[Any] = np.arange(PERIOD)
    reversed_slots = np.zeros(PERIOD, dtype=np.int64)
    for bit in range(PERIOD_BITS):
        reversed_slots |= (slots >> bit & 1) << PERIOD_BITS - 1 - bit
    owner = np.searchsorted(np.cumsum(quotas), reversed_slots, side="right")
    rank = np.empty(PERIOD, dtype=np.int64)
    for index, quota in enumerate(quotas):
        rank[owner == index] = np.arange(quota)
    return owner, rank

"""Seeded random orders: stored for small ranges, computed point by point for large ranges.

A stored order sorts a pseudo-random number of each element (SplitMix64: Steele, Lea and Flood, 2014), so that all
permutations are equally likely. It does not depend on the version of NumPy, whose generators may change their streams
(NEP 19). A range above `LARGEST_STORED` uses a generalised Feistel network over a grid of a x b >= n points, and walks
the cycle until the value is in range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
"""Increment of the state of SplitMix64."""

LARGEST_STORED = 1 << 16
"""Maximum size of a stored order in `permute_position`: a network over so few points is not uniform."""

STORED_ORDERS = 64
"""Maximum number of orders that `permute_position` stores, of at most 128 KiB each."""

ROUNDS = 8
"""Rounds of the network. Four suffice against few queries (Luby and Rackoff, 1988); here every point is queried."""


def mix_numbers(*words: int) -> int:
    """A 64-bit hash of whole numbers, the same on every machine."""
    state = 0
    for word in words:
        state = _finalise_word((state + word + GAMMA) & MASK)
    return state


def create_permutation(size: int, key: int) -> NDArray[np.int64]:
    """A uniformly random order [size] of 0..size-1, determined by `key`."""
    # All words differ, because the finaliser is a bijection: the order does not depend on the sort algorithm.
    return np.argsort(draw_random_words(size, key), kind="stable")


def draw_random_words(size: int, key: int) -> NDArray[np.uint64]:
    """Distinct random numbers [size] of 64 bits, determined by `key`."""
    states = np.arange(1, size + 1, dtype=np.uint64)
    states *= np.uint64(GAMMA)
    states += np.uint64(_finalise_word(key & MASK))
    return _finalise_all(states)


def permute_position(position: int, size: int, key: int) -> int:
    """The element at `position` of a random order of 0..size-1, in constant memory.

    Up to `LARGEST_STORED` the order is that of `create_permutation`; above, `key` determines another order.
    """
    if size < 2:
        return position
    if size <= LARGEST_STORED:
        return int(_build_stored_order(size, key)[position])
    # The grid has at most width - 1 points too many, so that the walk below nearly always ends at the first step.
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    value = _apply_feistel(position, width, height, key)
    # Cycle walking: the network permutes the grid, so that following it from a point in range returns to the range, and
    # no two points meet.
    while value >= size:
        value = _apply_feistel(value, width, height, key)
    return value


@lru_cache(maxsize=STORED_ORDERS)
def _build_stored_order(size: int, key: int) -> NDArray[np.uint16]:
    # uint16 has room for positions below LARGEST_STORED.
    return create_permutation(size, key).astype(np.uint16)


def _apply_feistel(value: int, width: int, height: int, key: int) -> int:
    """One pass of the network: the row and the column of a point move in turn, each by a hash of the other."""
    row, column = divmod(value, width)
    for number, round_key in enumerate(_round_keys(key)):
        # Each round is invertible, whatever the hash: it adds a function of one coordinate to the other.
        if number % 2:
            row = (row + _finalise_word(column + round_key & MASK)) % height
        else:
            column = (column + _finalise_word(row + round_key & MASK)) % width
    return row * width + column


@lru_cache(maxsize=1024)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix_numbers(key, number) for number in range(ROUNDS))


def _finalise_word(word: int) -> int:
    # The finaliser of SplitMix64. Python's integers do not wrap around, so that the mask keeps 64 bits.
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def _finalise_all(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `_finalise_word` to each word, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words

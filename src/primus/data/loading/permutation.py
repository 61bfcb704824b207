"""Orders of huge ranges that are computed, not stored: a keyed bijection of 0..n-1, evaluated at any point.

Four rounds of a balanced Feistel network over the next even number of bits, walking the cycle until the value is in
range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); the mixing function is SplitMix64's finaliser
(Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
ROUNDS = 4


def mix(*words: int) -> int:
    """A 64-bit hash of whole numbers, the same on every machine."""
    state = 0
    for word in words:
        state = _finalise((state + word + 0x9E3779B97F4A7C15) & MASK)
    return state


def permute(position: int, size: int, key: int) -> int:
    """The element at `position` of the order of 0..size-1 that `key` stands for."""
    if size < 2:
        return position
    half = _half_bits(size)
    value = _feistel(position, half, key)
    while value >= size:
        value = _feistel(value, half, key)
    return value


def permutation(size: int, key: int) -> NDArray[np.int64]:
    """The whole order [size], equal to `permute` at each position."""
    values = np.arange(size, dtype=np.uint64)
    if size < 2:
        return values.astype(np.int64)
    half = _half_bits(size)
    values = _feistel(values, half, key)
    while len(outside := np.flatnonzero(values >= size)):
        values[outside] = _feistel(values[outside], half, key)
    return values.astype(np.int64)


def _half_bits(size: int) -> int:
    return max(1, ((size - 1).bit_length() + 1) // 2)


def _feistel(value: Any, half: int, key: int) -> Any:
    """One pass over a Python int or an array of uint64."""
    low_bits = (1 << half) - 1
    left, right = value >> half, value & low_bits
    for round_key in _round_keys(key):
        left, right = right, left ^ (_finalise(right + round_key & MASK) & low_bits)
    return left << half | right


@lru_cache(maxsize=1024)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(key, number) for number in range(ROUNDS))


def _finalise(word: Any) -> Any:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31

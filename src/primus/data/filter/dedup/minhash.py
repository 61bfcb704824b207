"""Computes MinHash signatures from the word hashes of documents, and the keys of their bands.

A shingle is `ngram` consecutive words; a shorter document is one shingle. Each hash function is a permutation
``a * x + b`` of 32 bits (Dietzfelbinger and others 1997) of the shingle's hash. A signature has the minimum of each.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel
from primus.data.filter.dedup.recipe import DedupRecipe

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
"""Constants of SplitMix64 (Steele, Lea and Flood 2014)."""

WORD_FACTOR = np.uint64(0xD1342543DE82EF95)
HALF = np.uint64(32)
LARGEST = np.uint32(0xFFFFFFFF)
"""Minimum for a document without words."""


def compute_signatures(words: np.ndarray, offsets: np.ndarray, recipe: DedupRecipe) -> np.ndarray:
    """Signature of each document.

    Args:
        words: Hashes of all words, uint64.
        offsets: First word of each document, and the number of words, int64 of documents + 1.
        recipe: Number of hash functions, words of a shingle, and seed.

    Returns:
        uint32 of documents x hashes; all `LARGEST` for a document without words.
    """
    # Documents x hashes, so that the inner loop of the kernel reads the minima of one document from consecutive memory.
    minima = np.full((len(offsets) - 1, recipe.num_hashes), LARGEST, np.uint32)
    factors, addends = _draw_permutations(recipe.num_hashes, recipe.seed)
    _lower_minima(words, offsets, recipe.ngram, factors, addends, minima)
    return minima


def compute_band_keys(minima: np.ndarray, recipe: DedupRecipe) -> np.ndarray:
    """One key for each band: equal if all minima of the band are equal, else different but for 1 in 2**64.

    Args:
        minima: uint32 of documents x hashes.
        recipe: Number of bands, and of minima in a band.

    Returns:
        uint64 of bands x documents.
    """
    keys = np.empty((recipe.bands, len(minima)), np.uint64)
    _hash_bands(minima, recipe.rows, keys)
    return keys


def estimate_similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Estimated Jaccard similarity of two documents: the share of equal minima."""
    return float(np.mean(one == other))


@lru_cache(maxsize=8)
def _draw_permutations(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors, which are odd, and addends of `count` permutations, uint32."""
    # Each seed takes its own consecutive states of SplitMix64. An odd factor makes a * x + b a permutation modulo 2 **
    # 32.
    values = np.arange(seed * 2 * count + 1, (seed + 1) * 2 * count + 1, dtype=np.uint64)
    _mix_all(values)
    high = (values >> HALF).astype(np.uint32)
    return high[:count] | np.uint32(1), high[count:]


@compile_entry
def _mix_all(values: np.ndarray) -> None:
    for index in range(len(values)):
        values[index] = _mix_bits(values[index] * GOLDEN)


@compile_kernel
def _mix_bits(value: np.uint64) -> np.uint64:
    """A permutation of 64 bits in which each bit of the input affects all bits of the result."""
    value = (value ^ (value >> SHIFT_1)) * MIX_1
    value = (value ^ (value >> SHIFT_2)) * MIX_2
    return value ^ (value >> SHIFT_3)


@compile_entry
def _hash_bands(minima: np.ndarray, rows: int, keys: np.ndarray) -> None:
    """Hash the minima of each band, beginning with the band's number."""
    for document in range(keys.shape[1]):
        for band in range(keys.shape[0]):
            # The number of the band keeps equal minima in two bands apart.
            key = np.uint64(band + 1) * GOLDEN
            for row in range(band * rows, (band + 1) * rows):
                key = _mix_bits(key ^ np.uint64(minima[document, row]))
            keys[band, document] = key


@compile_kernel
def _hash_shingle(words: np.ndarray, first: int, size: int) -> np.uint32:
    """32-bit hash of `size` words from `first` on."""
    # A polynomial modulo 2 ** 64, of which the upper half is the best mixed. The caller passes the same `size` for all
    # shingles of a document.
    value = np.uint64(size)
    for position in range(first, first + size):
        value = value * WORD_FACTOR + words[position]
    value = (value ^ (value >> HALF)) * MIX_1
    return np.uint32(value >> HALF)


@compile_entry
def _lower_minima(
    words: np.ndarray, offsets: np.ndarray, ngram: int, factors: np.ndarray, addends: np.ndarray, minima: np.ndarray
) -> None:
    """Lower `minima` to the values of the shingles, four shingles at a time."""
    for document in range(len(offsets) - 1):
        row = minima[document]
        first, num_words = offsets[document], offsets[document + 1] - offsets[document]
        size = min(ngram, num_words)
        last = first + num_words - size + 1 if num_words else first
        # Reading and writing the minima is the cost: four shingles share one pass. The loop has no branch and 32-bit
        # arithmetic that wraps around, so that it vectorizes.
        while first + 4 <= last:
            one, two = _hash_shingle(words, first, size), _hash_shingle(words, first + 1, size)
            three, four = _hash_shingle(words, first + 2, size), _hash_shingle(words, first + 3, size)
            for index in range(len(row)):
                factor, addend = factors[index], addends[index]
                lower = min(np.uint32(factor * one + addend), np.uint32(factor * two + addend))
                upper = min(np.uint32(factor * three + addend), np.uint32(factor * four + addend))
                row[index] = min(row[index], min(lower, upper))
            first += 4
        # The remaining shingles, at most three.
        while first < last:
            one = _hash_shingle(words, first, size)
            for index in range(len(row)):
                row[index] = min(row[index], np.uint32(factors[index] * one + addends[index]))
            first += 1

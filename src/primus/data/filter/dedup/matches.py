"""Finds documents with equal keys, in memory independent of their number and of the number of equal keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from primus.data.filter.dedup.key_files import Keys

MOST_HELD = 2 << 20
"""Keys that are sorted at once; each needs about 80 bytes of memory."""


def match_keys(found: Iterable[Keys], most_held: int = MOST_HELD) -> Iterator[np.ndarray]:
    """Yield pairs of documents with equal keys, which connect all documents of a key to its first one.

    Args:
        found: Keys and their documents, the latter in groups of ascending numbers.
        most_held: Keys in memory in addition to the distinct ones.

    Yields:
        int64 of pairs x 2, the smaller number first.
    """
    held: list[Keys] = []
    size, limit = 0, most_held
    for keys in found:
        held.append(keys)
        size += len(keys)
        if size >= limit:
            pairs, different = _split_keys(_join_keys(held))
            yield pairs
            held, size = [different], len(different)
            # Of each key only the first document is kept. The limit is twice the number of distinct keys, so that they
            # are sorted again only after as many new keys.
            limit = max(most_held, 2 * size)
    if size:
        yield _split_keys(_join_keys(held))[0]


def divide_key_space(count: int) -> list[tuple[int, int]]:
    """Divide the keys into `count` equal ranges; returns the first and the last key of each."""
    borders = [(1 << 64) * index // count for index in range(count + 1)]
    return [(first, next_first - 1) for first, next_first in pairwise(borders)]


def choose_num_ranges(num_documents: int, most_held: int = MOST_HELD) -> int:
    """Number of ranges of keys, of which one at a time fits into memory."""
    return max(1, -(-num_documents // most_held))


def _join_keys(held: list[Keys]) -> Keys:
    if len(held) == 1:
        return held[0]
    rest = [keys.rest for keys in held if keys.rest is not None]
    return Keys(
        np.concatenate([keys.keys for keys in held]),
        np.concatenate([keys.documents for keys in held]),
        np.concatenate(rest) if rest else None,
    )


def _split_keys(all_keys: Keys) -> tuple[np.ndarray, Keys]:
    """Pairs of documents with equal keys, and the first document of each key."""
    keys, rest = all_keys.keys, all_keys.rest
    order = _sort_keys(keys, rest)
    keys, documents = keys[order], all_keys.documents[order]
    new = np.ones(len(keys), bool)
    new[1:] = keys[1:] != keys[:-1]
    if rest is not None:
        rest = rest[order]
        new[1:] |= rest[1:] != rest[:-1]
    starts = np.flatnonzero(new)
    # The sort is not stable, so that the first document of a key is its minimum, not its first entry.
    least = np.minimum.reduceat(documents, starts)
    least_of_each = np.repeat(least, np.diff(starts, append=len(keys)))
    later = documents != least_of_each
    pairs = np.stack([least_of_each[later], documents[later]], axis=1)
    return pairs, Keys(keys[starts], least, None if rest is None else rest[starts])


def _sort_keys(keys: np.ndarray, rest: np.ndarray | None) -> np.ndarray:
    """Order in which equal keys are neighbors."""
    order = np.argsort(keys)
    if rest is None:
        return order
    equal = keys[order[1:]] == keys[order[:-1]]
    # Equal first halves nearly always have equal second halves, so that the sort by both is rarely needed.
    if (rest[order[1:]] == rest[order[:-1]])[equal].all():
        return order
    return np.lexsort((rest, keys))

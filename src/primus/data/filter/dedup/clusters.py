"""Clusters of documents that pairs connect: union-find in one array."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from primus.data.filter.cleaning.compiler import compile_entry


def connect_documents(num_documents: int, pairs: Iterable[np.ndarray]) -> np.ndarray:
    """For each document the first one of its cluster, whatever the order of the pairs.

    Args:
        num_documents: How many there are; each needs 8 bytes.
        pairs: int64 of pairs x 2, in any number of arrays.

    Returns:
        int64 of documents; a document that is the first of its cluster, or alone, has its own number.
    """
    parents = np.arange(num_documents, dtype=np.int64)
    for some in pairs:
        _unite_pairs(parents, some)
    _flatten_tree(parents)
    return parents


@compile_entry
def _unite_pairs(parents: np.ndarray, pairs: np.ndarray) -> None:
    """Connect pairs; the root of a tree is the least number in it, and paths are halved on the way."""
    for index in range(len(pairs)):
        one, other = pairs[index, 0], pairs[index, 1]
        while parents[one] != one:
            parents[one] = parents[parents[one]]
            one = parents[one]
        while parents[other] != other:
            parents[other] = parents[parents[other]]
            other = parents[other]
        if one < other:
            parents[other] = one
        else:
            parents[one] = other


@compile_entry
def _flatten_tree(parents: np.ndarray) -> None:
    """Point each document to its root; parents have smaller numbers, so theirs is known already."""
    for document in range(len(parents)):
        parents[document] = parents[parents[document]]

"""Groups documents that pairs connect into clusters, with union-find in one array."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from primus.data.filter.cleaning.compiler import compile_entry


def connect_documents(num_documents: int, pairs: Iterable[np.ndarray]) -> np.ndarray:
    """The first document of each document's cluster. The result does not depend on the order of the pairs.

    Args:
        num_documents: Number of documents; each needs 8 bytes of memory.
        pairs: int64 of pairs x 2, in any number of arrays.

    Returns:
        int64 of documents; the first document of a cluster, and one in no cluster, has its own number.
    """
    # Invariant: parents[i] <= i, and parents[i] == i only for roots. It makes the result independent of the order of
    # the pairs, and lets one pass flatten the trees.
    parents = np.arange(num_documents, dtype=np.int64)
    for some in pairs:
        _unite_pairs(parents, some)
    _flatten_tree(parents)
    return parents


@compile_entry
def _unite_pairs(parents: np.ndarray, pairs: np.ndarray) -> None:
    """Connect the documents of pairs. The root of a tree is the smallest number in it."""
    for index in range(len(pairs)):
        one, other = pairs[index, 0], pairs[index, 1]
        while parents[one] != one:
            # Path halving: each step points to the grandparent, so that later searches are short without a second pass.
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
    """Replace the parent of each document with its root."""
    for document in range(len(parents)):
        # The parent has a smaller number, so that it already points to its root.
        parents[document] = parents[parents[document]]

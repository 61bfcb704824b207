"""Which documents of a token file are for training, validation and test where one file serves all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from primus.errors import UsageError

SHARES = ("training", "validation", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of training, validation and test data, summing to 1, of a string like ``99,1,0``.

    Raises:
        UsageError: It is not one to three numbers of which the first is positive.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SHARES) or min(shares) < 0 or not 0 < sum(shares) < float("inf") or shares[0] == 0:
        raise UsageError(f"split '{split}'", "give the shares of training, validation and test data, like 99,1,0")
    first, second, third = (*shares, 0.0, 0.0)[:3]
    total = first + second + third
    return first / total, second / total, third / total


def split_borders(count: int, shares: Sequence[float]) -> list[int]:
    """First of `count` sequences of each share, and the end; a share above 0 has at least one where there are enough.

    Otherwise rounded as in Megatron-LM (megatron/core/datasets/blended_megatron_dataset_builder.py).
    """
    ends = [round(count * sum(shares[: index + 1])) for index in range(len(shares))]
    sizes = [end - start for start, end in pairwise([0, *ends])]
    for index, share in enumerate(shares):
        largest = sizes.index(max(sizes))
        if share > 0 and sizes[index] == 0 and sizes[largest] > 1:
            sizes[index], sizes[largest] = 1, sizes[largest] - 1
    return [0, *accumulate(sizes)]

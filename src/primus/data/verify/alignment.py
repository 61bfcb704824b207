"""Checks the alignment of tokens: in a stream that lost or gained a byte, the bytes form other tokens.

The bytes of a token depend on each other, and those of neighboring tokens hardly do. A stream that is read from a
wrong byte therefore has a higher entropy. If all tokens are small, its values are multiples of 256.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primus.data.megatron.indexed_dataset import bin_path
from primus.data.verify.findings import DamagePlace, TokenFileFinding, build_finding

WINDOWS, WINDOW_TOKENS = 16, 1 << 17
"""Evenly spread parts of a file that are read, and tokens of each."""

FEWEST_TOKENS = 2048
"""Minimum tokens for a significant result."""

FEWEST_VALUES = 16
"""Minimum different values for a significant result."""

LOST_BITS = 0.2
"""Minimum bits of entropy per token that another first byte saves. Text in GPT-2 tokens saves more than two."""


def check(prefix: Path, dtype: np.dtype[np.generic], num_tokens: int) -> list[TokenFileFinding]:
    """Find parts of a .bin whose tokens begin at another byte.

    Args:
        prefix: Path without extension.
        dtype: Type of the tokens.
        num_tokens: Number of tokens.
    """
    if dtype.kind not in "iu" or dtype.itemsize == 1 or num_tokens < FEWEST_TOKENS:
        return []
    count = min(WINDOWS, -(-num_tokens // WINDOW_TOKENS))
    starts = np.linspace(0, max(0, num_tokens - WINDOW_TOKENS), count).astype(np.int64).tolist()
    places = [
        DamagePlace(byte=start * dtype.itemsize)
        for start in starts
        if _is_shifted(_read_window(prefix, dtype.itemsize, start, num_tokens), dtype)
    ]
    if not places:
        return []
    problem = "misaligned tokens: the stream has probably lost or gained a byte"
    return [build_finding("alignment", bin_path(prefix), problem, *places, count=len(places))]


def _read_window(prefix: Path, width: int, start: int, num_tokens: int) -> NDArray[np.uint8]:
    size = min(WINDOW_TOKENS, num_tokens - start) * width
    return np.fromfile(bin_path(prefix), np.uint8, size, offset=start * width)


def _is_shifted(content: NDArray[np.uint8], dtype: np.dtype[np.generic]) -> bool:
    width = dtype.itemsize
    tokens = content.view(f"<u{width}")
    values = np.unique(tokens)
    if len(values) < FEWEST_VALUES:
        return False
    if not (values % 256).any():
        return True
    # Only within the window, so that each shift has the same number of tokens.
    size = len(content) - width
    others = (content[offset : offset + size].view(f"<u{width}") for offset in range(1, width))
    return min(map(_compute_entropy, others)) < _compute_entropy(tokens) - LOST_BITS


def _compute_entropy(tokens: NDArray[np.unsignedinteger]) -> float:  # type: ignore[type-arg]
    """Bits per token."""
    _, counts = np.unique(tokens, return_counts=True)
    shares = counts / len(tokens)
    return float(-(shares * np.log2(shares)).sum())

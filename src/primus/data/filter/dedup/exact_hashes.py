"""128-bit hashes of documents, for finding equal ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash


def hash_contents(contents: Iterable[bytes | memoryview]) -> np.ndarray:
    """XXH3 hash of each content, as uint64 of documents x 2.

    Args:
        contents: UTF-8 of texts, or the hashes of their words.
    """
    joined = b"".join(xxhash.xxh3_128_digest(content) for content in contents)
    return np.frombuffer(joined, ">u8").astype(np.uint64).reshape(-1, 2)

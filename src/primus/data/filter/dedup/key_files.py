"""Key files: blocks of documents with sorted keys for each band, so that a range of keys is contiguous.

The layout of a block of n documents, in order:

- for each band, its n keys, sorted (uint64);
- the first halves of the n exact hashes, sorted (uint64);
- the second halves of the exact hashes, in the order of the first halves (uint64);
- for each sorted row, the index in the block of each key's document (uint32);
- 4 bytes of padding if the size is not a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

BLOCK_DOCUMENTS = 1 << 16
KEY_BYTES, PLACE_BYTES = 8, 4


@dataclass
class BlockWriter:
    """Writes the keys of documents in blocks of at most `BLOCK_DOCUMENTS`."""

    file: BinaryIO
    sizes: list[int] = field(default_factory=list)
    """Number of documents in each written block."""
    _keys: list[np.ndarray] = field(default_factory=list)
    _held: int = 0

    def add_keys(self, keys: np.ndarray) -> None:
        """Add the keys of more documents.

        Args:
            keys: uint64 of (bands + 2) x documents; the last two rows are the exact hash.
        """
        while keys.shape[1]:
            room = BLOCK_DOCUMENTS - self._held
            self._keys.append(keys[:, :room])
            self._held += self._keys[-1].shape[1]
            keys = keys[:, room:]
            if self._held == BLOCK_DOCUMENTS:
                self.flush()

    def flush(self) -> None:
        """Write the buffered keys as one block."""
        if not self._held:
            return
        keys = np.concatenate(self._keys, axis=1)
        # A stable sort keeps documents with equal keys in ascending order.
        order = np.argsort(keys[:-1], axis=1, kind="stable")
        self.file.write(np.take_along_axis(keys[:-1], order, axis=1).tobytes())
        # The second halves of the exact hashes follow the order of the first halves, so that they need no separate
        # index.
        self.file.write(keys[-1][order[-1]].tobytes())
        self.file.write(order.astype(np.uint32).tobytes())
        self.file.write(bytes(_count_block_bytes(*keys.shape) - keys.nbytes - order.size * PLACE_BYTES))
        self.sizes.append(self._held)
        self._keys, self._held = [], 0


@dataclass(frozen=True)
class KeyFile:
    """The keys of one shard."""

    path: Path
    sizes: Sequence[int]
    """Number of documents in each block."""
    first: int
    """Number of the first document of the shard in the whole input."""
    num_bands: int


@dataclass(frozen=True)
class Keys:
    """Keys of some documents."""

    keys: np.ndarray
    """uint64."""
    documents: np.ndarray
    """Numbers in the whole input, int64."""
    rest: np.ndarray | None = None
    """Second halves of exact hashes, uint64; None for a band."""

    def __len__(self) -> int:
        return len(self.keys)


def read_keys(file: KeyFile, band: int, first: int, last: int) -> Iterator[Keys]:
    """Yield the keys from `first` to `last`, both included, of each block.

    Args:
        file: The file.
        band: Index of the band; `num_bands` for exact hashes.
        first: Smallest key.
        last: Largest key.
    """
    # Only the pages of the range are read. An empty file cannot be mapped.
    content = np.memmap(file.path, np.uint8, "r") if file.sizes else np.empty(0, np.uint8)
    document, rows = file.first, file.num_bands + 2
    for size in file.sizes:
        block, content = np.split(content, [_count_block_bytes(rows, size)])
        keys = block[: rows * size * KEY_BYTES].view(np.uint64).reshape(rows, size)
        places = block[keys.nbytes :].view(np.uint32)[band * size : (band + 1) * size]
        # As uint64: NumPy takes a Python int as int64, and compares uint64 with int64 as float64, which loses low bits.
        low = np.searchsorted(keys[band], np.uint64(first), "left")
        high = np.searchsorted(keys[band], np.uint64(last), "right")
        rest = np.array(keys[-1, low:high]) if band == file.num_bands else None
        # Copies, so that the result does not keep the mapping open.
        yield Keys(np.array(keys[band, low:high]), places[low:high].astype(np.int64) + document, rest)
        document += size


def _count_block_bytes(rows: int, num_documents: int) -> int:
    places = (rows - 1) * num_documents * PLACE_BYTES
    # Rounded up to 8 bytes, so that the keys of the next block are aligned.
    return rows * num_documents * KEY_BYTES + -(-places // KEY_BYTES) * KEY_BYTES

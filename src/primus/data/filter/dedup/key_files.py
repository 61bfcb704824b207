"""Files of keys: for blocks of documents and each band the keys in order, so that a range of them is read in one piece.

A block of n documents has, one after the other: for each band and then for the first half of the exact hashes its n
keys in order (uint64); the second half of the exact hashes in that order (uint64); for each of these rows of keys the
places in the block of their documents (uint32); and 4 bytes of nothing where that is no multiple of 8.
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
    """Documents of each block that is written."""
    _keys: list[np.ndarray] = field(default_factory=list)
    _held: int = 0

    def add_keys(self, keys: np.ndarray) -> None:
        """Take the keys of further documents.

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
        """Write what is held."""
        if not self._held:
            return
        keys = np.concatenate(self._keys, axis=1)
        order = np.argsort(keys[:-1], axis=1, kind="stable")
        self.file.write(np.take_along_axis(keys[:-1], order, axis=1).tobytes())
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
    """Documents of each block."""
    first: int
    """Number of its first document in the whole input."""
    num_bands: int


@dataclass(frozen=True)
class Keys:
    """Keys of some documents."""

    keys: np.ndarray
    """uint64."""
    documents: np.ndarray
    """Numbers in the whole input, int64."""
    rest: np.ndarray | None = None
    """For exact hashes the second half, uint64."""

    def __len__(self) -> int:
        return len(self.keys)


def read_keys(file: KeyFile, band: int, first: int, last: int) -> Iterator[Keys]:
    """Keys from `first` to `last`, both included, of each block.

    Args:
        file: The file.
        band: Which band; `num_bands` for exact hashes.
        first: Least key.
        last: Greatest key.
    """
    content = np.memmap(file.path, np.uint8, "r") if file.sizes else np.empty(0, np.uint8)
    document, rows = file.first, file.num_bands + 2
    for size in file.sizes:
        block, content = np.split(content, [_count_block_bytes(rows, size)])
        keys = block[: rows * size * KEY_BYTES].view(np.uint64).reshape(rows, size)
        places = block[keys.nbytes :].view(np.uint32)[band * size : (band + 1) * size]
        low = np.searchsorted(keys[band], np.uint64(first), "left")
        high = np.searchsorted(keys[band], np.uint64(last), "right")
        rest = np.array(keys[-1, low:high]) if band == file.num_bands else None
        yield Keys(np.array(keys[band, low:high]), places[low:high].astype(np.int64) + document, rest)
        document += size


def _count_block_bytes(rows: int, num_documents: int) -> int:
    places = (rows - 1) * num_documents * PLACE_BYTES
    return rows * num_documents * KEY_BYTES + -(-places // KEY_BYTES) * KEY_BYTES

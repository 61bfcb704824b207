"""What a format writes: files that are written one after the other, and small ones that complete the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from primus.checkpoint.weights import TensorInfo

JOURNAL, LOCK = ".conversion.jsonl", ".conversion.lock"
"""Files of a conversion that is being written."""
CHUNK_BYTES = 24 << 20
"""Tensor data in memory at a time; larger tensors are read and written in rows.

Below 32 MiB, the largest allocation that glibc serves from memory that it has (mallopt(3), M_MMAP_THRESHOLD), so that
pages are not faulted in again for each part.
"""

FEWEST_SPLIT_BYTES = 4 << 20
"""Smaller tensors are not split at borders: an entry of a file costs more than a copy."""
WRITE_BYTES = 256 << 10
"""Data of one write to a file.

Linux allocates page cache in folios as large as the write (mm/filemap.c, __filemap_get_folio with fgf_set_order). Of
700 MB to ext4 on Linux 6.18, writes of 256 KB took 0.2 s of processor time and writes of 1 MB or more 1.2 s.
"""

FileRecord = Any
"""What a file's writer found out, as JSON: kept when a conversion is interrupted."""


class RankGrid(NamedTuple):
    """Sizes of a parallel layout."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


class OutputFile(NamedTuple):
    """One file with tensors."""

    name: str
    """Relative to the folder."""
    num_bytes: int
    """Of its tensors."""
    write: Callable[[BinaryIO, Callable[[int], None]], FileRecord]
    """Writes the file, and calls its second argument with the number of bytes after each part."""


class OutputPlan(NamedTuple):
    """All files of a checkpoint."""

    files: list[OutputFile]
    finish: Callable[[Path, Mapping[str, FileRecord]], None]
    """Writes the other files into the folder, given the record of each file by name."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def split_bytes(data: Any) -> Iterator[memoryview]:
    """The bytes of a buffer in parts of at most `WRITE_BYTES`."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), WRITE_BYTES):
        yield view[start : start + WRITE_BYTES]


def split_rows(info: TensorInfo, borders: Sequence[int] = ()) -> Iterator[slice | None]:
    """Slices of at most `CHUNK_BYTES`, at least a row each; None for a tensor that is small enough or has no rows.

    Args:
        info: The tensor.
        borders: Rows at which a slice of a tensor that is not small begins anyway.
    """
    if not info.shape or info.num_bytes <= (min(FEWEST_SPLIT_BYTES, CHUNK_BYTES) if borders else CHUNK_BYTES):
        yield None
        return
    step = max(1, CHUNK_BYTES * info.shape[0] // info.num_bytes)
    for first, last in pairwise((0, *borders, info.shape[0])):
        for start in range(first, last, step):
            yield slice(start, min(start + step, last))

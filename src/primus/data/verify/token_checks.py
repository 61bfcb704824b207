"""Scans a part of a .bin in one pass: digests, token range, ends of documents, and pages of zeros.

One chunk at a time is read into one buffer, so that all checks find it in the core's cache.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from primus.data.megatron.fingerprint import compute_token_digest
from primus.data.megatron.indexed_dataset import bin_path
from primus.data.verify.findings import MAX_PLACES
from primus.data.verify.index_checks import open_index
from primus.errors import PrimusError

RANGE_CHUNKS = 64
"""Chunks that a process scans at a time: 32 or 64 MB."""

SECTOR = 512
PAGE = 4096
LOST_BYTES = PAGE - SECTOR
"""Minimum consecutive zeros of a lost page, which may begin between two of our sectors."""


class ScanTask(Struct, frozen=True, kw_only=True):
    """A part of a .bin to scan."""

    prefix: Path
    dtype: str
    """Type of the tokens."""
    first: int = 0
    """First token."""
    last: int
    """One past the last."""
    limit: int | None
    """Every token id is below it; None if only the type limits them."""
    eod: int | None
    """End-of-document token; None to skip the check. Requires a valid index."""
    chunk: int
    """Tokens that are read at a time."""


class TokenHits(Struct):
    """Positions of one kind, in tokens: the first ones, and the count of all."""

    first: list[int] = []
    count: int = 0

    def add_positions(self, positions: NDArray[Any]) -> None:
        """Append positions [n]."""
        self.first += positions[: max(0, MAX_PLACES - len(self.first))].tolist()
        self.count += len(positions)

    def extend_hits(self, other: TokenHits) -> None:
        """Append the positions of the next part."""
        self.first += other.first[: max(0, MAX_PLACES - len(self.first))]
        self.count += other.count


class TokenScan(Struct):
    """Measured contents of a part of a .bin."""

    digests: bytes = b""
    """Digests of its chunks."""
    largest: int = 0
    """Largest token id."""
    outside: TokenHits = field(default_factory=TokenHits)
    """Tokens outside the vocabulary."""
    no_eod: TokenHits = field(default_factory=TokenHits)
    """Last tokens of documents that differ from the end-of-document token."""
    stray_eod: TokenHits = field(default_factory=TokenHits)
    """End-of-document tokens that are not the last of a document."""
    zero_sectors: list[tuple[int, int]] = []
    """First byte of each run of sectors of zeros, and one past its last."""


def split_tasks(whole: ScanTask) -> list[ScanTask]:
    """The parts of a .bin, in order."""
    size = RANGE_CHUNKS * whole.chunk
    return [
        replace(whole, first=first, last=min(first + size, whole.last))
        for first in range(whole.first, whole.last, size)
    ]


def join_scans(scans: Iterable[TokenScan]) -> TokenScan:
    """Join the results of the parts of a .bin, in order."""
    whole = TokenScan()
    for part in scans:
        whole.digests += part.digests
        whole.largest = max(whole.largest, part.largest)
        whole.outside.extend_hits(part.outside)
        whole.no_eod.extend_hits(part.no_eod)
        whole.stray_eod.extend_hits(part.stray_eod)
        for first, last in part.zero_sectors:
            # A run of zeros may continue across the border of two parts.
            if whole.zero_sectors and whole.zero_sectors[-1][1] == first:
                first, _ = whole.zero_sectors.pop()
            whole.zero_sectors.append((first, last))
    return whole


def scan_part(task: ScanTask) -> TokenScan:
    """Read a part once and run all checks.

    Raises:
        PrimusError: The file was truncated during the scan.
    """
    dtype = np.dtype(task.dtype)
    limit = _compute_limit(dtype, task.limit)
    ends = _find_ends(task)
    digests, largest = bytearray(), 0
    outside, no_eod, stray_eod, sectors = TokenHits(), TokenHits(), TokenHits(), []
    for start, chunk in _read_chunks(task, dtype):
        # As unsigned numbers, negative ids are the largest: the maximum of a chunk checks both bounds in one pass.
        unsigned = chunk.view(f"<u{dtype.itemsize}")
        top = int(unsigned.max())
        if limit is not None and top >= limit:
            outside.add_positions(start + np.flatnonzero(unsigned >= np.array(limit, unsigned.dtype)))
        largest = max(largest, int(chunk.max()) if top > np.iinfo(dtype).max else top)
        digests += compute_token_digest(chunk, top if top <= np.iinfo(dtype).max else None)
        if ends is not None:
            low, high = ends.searchsorted((start, start + len(chunk)), side="right")
            _check_ends(chunk, task.eod, start, ends[low:high], no_eod, stray_eod)
        sectors.append(_find_zero_sectors(chunk, start * dtype.itemsize))
    return TokenScan(bytes(digests), largest, outside, no_eod, stray_eod, find_runs(np.concatenate(sectors)))


def find_runs(sectors: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs of consecutive sectors, given the first byte of each: first byte of the run, and one past its last."""
    if not len(sectors):
        return []
    breaks = np.flatnonzero(np.diff(sectors) != SECTOR)
    firsts = sectors[np.append(0, breaks + 1)]
    lasts = sectors[np.append(breaks, len(sectors) - 1)] + SECTOR
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _compute_limit(dtype: np.dtype[Any], limit: int | None) -> int | None:
    """Limit of all ids as unsigned numbers, which excludes negative ones too; None if every value is valid."""
    highest = int(np.iinfo(dtype).max) + 1
    limit = highest if limit is None else min(max(0, limit), highest)
    return None if limit > np.iinfo(f"u{dtype.itemsize}").max else limit


def _read_chunks(task: ScanTask, dtype: np.dtype[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the first token of each chunk, and the chunk, in a buffer that the next chunk overwrites."""
    buffer = np.empty(task.chunk, dtype)
    path = bin_path(task.prefix)
    with path.open("rb", buffering=0) as file:
        offset, size = task.first * dtype.itemsize, (task.last - task.first) * dtype.itemsize
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_SEQUENTIAL)
        file.seek(offset)
        for start in range(task.first, task.last, task.chunk):
            chunk = buffer[: min(task.chunk, task.last - start)]
            _fill_chunk(file, chunk, path)
            yield start, chunk


def _fill_chunk(file: FileIO, chunk: NDArray[Any], path: Path) -> None:
    view = chunk.data.cast("B")
    while view:
        count = file.readinto(view)
        if not count:
            raise PrimusError(f"{path}: truncated while it was read", "verify it again when no process writes to it")
        view = view[count:]


def _find_ends(task: ScanTask) -> NDArray[np.int64] | None:
    """Position after each document that ends in the part, including documents without tokens."""
    if task.eod is None:
        return None
    index, _ = open_index(task.prefix)
    assert index is not None
    size, width = bin_path(task.prefix).stat().st_size, np.dtype(task.dtype).itemsize

    def end(document: int) -> int:
        return int(index.compute_document_starts(document + 1, document + 2, size)[0]) // width

    # Bisection, because each process needs only the documents of its part of the file.
    documents = range(index.num_documents)
    first, last = (bisect_right(documents, position, key=end) for position in (task.first, task.last))
    return index.compute_document_starts(first + 1, last + 1, size) // width


def _check_ends(
    chunk: NDArray[Any], eod: int | None, start: int, ends: NDArray[np.int64], no_eod: TokenHits, stray_eod: TokenHits
) -> None:
    """Compare the ends of documents with the positions of the end-of-document token."""
    places = ends - 1 - start
    found = chunk == eod
    # Equal counts and every end in place: without damage nothing else is computed.
    if len(places) == np.count_nonzero(found) and bool((chunk[places] == eod).all()):
        return
    places = np.unique(places)
    no_eod.add_positions(start + places[~found[places]])
    found[places] = False
    stray_eod.add_positions(start + np.flatnonzero(found))


def _find_zero_sectors(chunk: NDArray[Any], byte: int) -> NDArray[np.int64]:
    """First byte of each sector of zeros."""
    words = chunk.view("u1")[: chunk.nbytes // SECTOR * SECTOR].view("u8").reshape(-1, SECTOR // 8)
    # The first word rules out most sectors, so that few are read as a whole.
    candidates = np.flatnonzero(words[:, 0] == 0)
    if len(candidates):
        candidates = candidates[~words[candidates].any(axis=1)]
    return byte + SECTOR * candidates.astype(np.int64)

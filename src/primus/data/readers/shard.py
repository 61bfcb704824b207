"""Shards: fixed parts of the input, independent of the number of workers."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

SHARD_BYTES = 32 << 20
"""Maximum size of a shard of files that can be divided; a killed worker loses at most this much work."""
SMALLEST_SHARD_BYTES = 4 << 20
"""Minimum size of a shard: below it, the overhead of a shard (claim, result, fingerprints) becomes noticeable."""
SHARDS = 64
"""Number of shards of a small input; enough to keep the workers of a machine busy until the end."""


class FilePart(Struct, frozen=True):
    """A range of a file; the whole file by default."""

    file: str
    """Path or URL."""
    first: int = 0
    """First byte of a text file or first row group of parquet. A line belongs to the range that has its first byte."""
    last: int | None = None
    """One past the last; None for the end of the file."""


class Shard(Struct, frozen=True):
    """Unit of work of a worker: consecutive parts of the input."""

    index: int
    """Position in the order of the input."""
    parts: tuple[FilePart, ...]
    """Parts in order."""
    bytes: int
    """Size on disk (compressed, if the files are)."""


def choose_shard_size(total_bytes: int) -> int:
    """Choose the size of the shards of an input of `total_bytes`."""
    return min(max(total_bytes // SHARDS, SMALLEST_SHARD_BYTES), SHARD_BYTES)


def group_parts(parts: Iterable[tuple[FilePart, int]], shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Group consecutive parts into shards of about `shard_bytes`; a part is never divided.

    Args:
        parts: Parts of the input in order, with the size of each in bytes.
        shard_bytes: Size at which a shard is complete.
    """
    shards: list[Shard] = []
    held: list[FilePart] = []
    size = 0
    for part, num_bytes in parts:
        if held and size + num_bytes > shard_bytes:
            shards.append(Shard(len(shards), tuple(held), size))
            held, size = [], 0
        held.append(part)
        size += num_bytes
    if held:
        shards.append(Shard(len(shards), tuple(held), size))
    return shards

"""Work in pieces that do not depend on who does it: a shard is a fixed part of the input, the same for any workers."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

SHARD_BYTES = 32 << 20
"""Largest size of a shard of files that can be cut; a worker that is killed repeats at most this much."""
SMALLEST_SHARD_BYTES = 4 << 20
SHARDS = 64
"""So many shards, if none gets too small, keep the workers of a machine busy to the end."""


class FilePart(Struct, frozen=True):
    """A range of one file, the whole of it by default."""

    file: str
    """Path or URL."""
    first: int = 0
    """First byte of JSON lines, or first row group of parquet; a line is in the range that its first byte is in."""
    last: int | None = None
    """One past the last; None for the end of the file."""


class Shard(Struct, frozen=True):
    """What one worker does at a time: consecutive parts of the input."""

    index: int
    """Its place in the order of the input."""
    parts: tuple[FilePart, ...]
    """In order."""
    bytes: int
    """Size in the files, compressed where they are."""


def choose_shard_size(total_bytes: int) -> int:
    """Size of the shards of an input of `total_bytes`."""
    return min(max(total_bytes // SHARDS, SMALLEST_SHARD_BYTES), SHARD_BYTES)


def group_parts(parts: Iterable[tuple[FilePart, int]], shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Shards of consecutive parts, each of about `shard_bytes`; a part is never divided.

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

"""Divide files into the parts that workers read: byte ranges of lines, parquet row groups, or whole files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from primus.data.readers import columns
from primus.data.readers.files import read_size
from primus.data.readers.kinds import RECORDS, detect_compression, detect_kind
from primus.data.readers.shard import SHARD_BYTES, FilePart, Shard, group_parts


def plan_shards(files: Iterable[str], text_documents: str = "file", shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Divide files into shards, in order. The result depends only on the arguments and the sizes of the files.

    Args:
        files: Paths and URLs.
        text_documents: Unit of a document in a .txt file; a file can be divided only if the unit is a line.
        shard_bytes: Maximum size of a shard; a file that cannot be divided may exceed it.

    Raises:
        PrimusError: A file cannot be read.
    """
    return group_parts(
        (each for file in files for each in _divide_file(file, text_documents, shard_bytes)), shard_bytes
    )


def _divide_file(file: str, text_documents: str, shard_bytes: int) -> Iterator[tuple[FilePart, int]]:
    if detect_kind(file) == ".parquet":
        yield from _list_row_groups(file, shard_bytes)
        return
    size = read_size(file)
    of_lines = detect_kind(file) in RECORDS or (detect_kind(file) == ".txt" and text_documents == "line")
    count = -(-size // shard_bytes) if of_lines and not detect_compression(file) else 1
    if count <= 1:
        yield FilePart(file), size
        return
    borders = [size * index // count for index in range(count + 1)]
    for first, last in pairwise(borders):
        yield FilePart(file, first, last if last < size else None), last - first


def _list_row_groups(file: str, shard_bytes: int) -> Iterator[tuple[FilePart, int]]:
    """Yield ranges of consecutive row groups of about `shard_bytes`, with their sizes."""
    first = held = 0
    sizes = columns.read_row_group_sizes(file)
    for index, size in enumerate(sizes):
        if held and held + size > shard_bytes:
            yield FilePart(file, first, index), held
            first, held = index, 0
        held += size
    if sizes:
        yield (FilePart(file, first) if first else FilePart(file)), held

"""The parts of files that workers read: byte ranges of lines, row groups of parquet, else whole files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from primus.data.documents import columns
from primus.data.documents.files import size_of
from primus.data.documents.kinds import RECORDS, compression, kind
from primus.data.pipeline.shards import SHARD_BYTES, Part, Shard, group


def plan(files: Iterable[str], text_documents: str = "file", shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Shards of the files in their order; a function of the files alone, whoever asks.

    Args:
        files: Paths and URLs.
        text_documents: What is a document in a .txt file; only lines can be cut.
        shard_bytes: Size of a shard where a file can be cut; a file that cannot is not.

    Raises:
        PrimusError: A file cannot be read.
    """
    return group((each for file in files for each in _parts(file, text_documents, shard_bytes)), shard_bytes)


def _parts(file: str, text_documents: str, shard_bytes: int) -> Iterator[tuple[Part, int]]:
    if kind(file) == ".parquet":
        yield from _row_groups(file, shard_bytes)
        return
    size = size_of(file)
    of_lines = kind(file) in RECORDS or (kind(file) == ".txt" and text_documents == "line")
    count = -(-size // shard_bytes) if of_lines and not compression(file) else 1
    if count <= 1:
        yield Part(file), size
        return
    borders = [size * index // count for index in range(count + 1)]
    for first, last in pairwise(borders):
        yield Part(file, first, last if last < size else None), last - first


def _row_groups(file: str, shard_bytes: int) -> Iterator[tuple[Part, int]]:
    """Consecutive row groups of about `shard_bytes` together."""
    first = held = 0
    sizes = columns.row_group_sizes(file)
    for index, size in enumerate(sizes):
        if held and held + size > shard_bytes:
            yield Part(file, first, index), held
            first, held = index, 0
        held += size
    if sizes:
        yield (Part(file, first) if first else Part(file)), held

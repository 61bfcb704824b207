"""Human-readable location (file and line) of a document; lines are counted only when a message needs it."""

from __future__ import annotations

import os
from functools import lru_cache

from primus.data.readers.files import open_raw
from primus.data.readers.kinds import COLUMNS, detect_kind, is_remote
from primus.data.readers.shard import FilePart

PIECE = 64 << 20
"""Bytes whose newlines are counted and cached together, so that later locations in the same file are cheap."""
FARTHEST_COUNT = 4 << 30
"""Offset beyond which a line is named relative to a byte, because counting would read gigabytes for each shard."""


def locate_document(part: FilePart, number: int) -> str:
    """Format the location of line or row `number` (from 1) of a part as ``FILE:LINE`` or ``FILE: row ROW``."""
    if detect_kind(part.file) in COLUMNS:
        return f"{part.file}: row {_count_rows_before(part.file, _read_change_time(part.file), part.first) + number}"
    if part.first and (is_remote(part.file) or part.first > FARTHEST_COUNT):
        return f"{part.file}: line {number} after byte {part.first}"
    return f"{part.file}:{_count_lines_before(part) + number}"


def _count_lines_before(part: FilePart) -> int:
    """Number of lines before the first line that begins in a part."""
    if not part.first:
        return 0
    counted = part.first - 1  # the line that ends at or after this byte is the last one before the part
    changed = _read_change_time(part.file)
    whole = sum(_count_newlines(part.file, changed, start, PIECE) for start in range(0, counted - PIECE + 1, PIECE))
    rest = counted % PIECE
    return whole + _count_newlines(part.file, changed, counted - rest, rest) + 1


@lru_cache(maxsize=4096)
def _count_newlines(file: str, changed: int, start: int, size: int) -> int:
    count = 0
    with open_raw(file) as stream:
        stream.seek(start)
        while size and (chunk := stream.read(min(size, 1 << 20))):
            count += chunk.count(b"\n")
            size -= len(chunk)
    return count


@lru_cache(maxsize=4096)
def _count_rows_before(file: str, changed: int, row_group: int) -> int:
    if not row_group:
        return 0
    from pyarrow import parquet

    with open_raw(file) as stream, parquet.ParquetFile(stream) as table:
        return sum(table.metadata.row_group(index).num_rows for index in range(row_group))


def _read_change_time(file: str) -> int:
    return 0 if is_remote(file) else os.stat(file).st_mtime_ns

"""Reads log files: head and tail of each, as lines."""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from msgspec import Struct

from primus.diagnosis.log_line import ANSI
from primus.errors import PrimusError

SMALLEST = 128 * 1024
LARGEST = 64 * 1024 * 1024
"""Minimum and maximum bytes read of a log, however many logs share the budget."""
HEAD_SHARE = 8
"""The head gets one part of this number: failures are at the end, wrong set-ups at the beginning."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
CHUNK = 1024 * 1024
SAMPLE = 8192
LONGEST_LINE = 64 * 1024
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NODE_IN_NAME = re.compile(r"node[_-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_HOLE = re.compile(rb"\0{16,}")
_ODD = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")


class ReadableFile(Protocol):
    """A stream of bytes."""

    def read(self, count: int, /) -> bytes: ...


class LogFile(Struct, frozen=True, kw_only=True):
    """A log file, or text that is treated as one."""

    name: str
    """The name that reports show."""
    path: Path | None = None
    data: bytes | None = None
    """Its content, if it is not a file."""
    rest: bytes = b""
    """Its end, if the log was too long and `data` is its beginning."""
    lines_before_rest: int = 0
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    """When it was written, if its lines have no times."""
    attempt: int | None = None
    """The attempt whose lines count, if the log covers several attempts."""
    local_to_rank: int | None = 0
    """Rank of local rank 0 of its node."""
    since: float | None = None
    """Lines with an earlier time belong to another attempt."""
    is_kernel: bool = False
    """Whether the kernel wrote it, with times since its boot."""


class LogWindow:
    """A part of a log.

    Args:
        data: Its content without colors.
        offset: Bytes of the file before it.
    """

    def __init__(self, data: bytes, offset: int = 0) -> None:
        self.data = data
        self.offset = offset

    @functools.cached_property
    def lines(self) -> list[bytes]:
        return self.data.split(b"\n")


class LogContent(Struct, frozen=True, kw_only=True):
    """The parts read of a log."""

    windows: tuple[LogWindow, ...] = ()
    note: str = ""
    mtime: float = 0.0


def parse_rank_of_path(path: Path) -> int | None:
    """Rank in the file's name, or in the name of the folder that torchrun made."""
    found = _RANK_IN_NAME.search(path.name)
    if found:
        return int(found[1])
    is_torchrun = path.name in ("stdout.log", "stderr.log") and path.parent.name.isdigit()
    return int(path.parent.name) if is_torchrun and path.parent.parent.name.startswith("attempt_") else None


def parse_node_of_path(path: Path) -> int:
    """Node in the file's name, else 0."""
    found = _NODE_IN_NAME.search(path.name)
    return int(found[1]) if found else 0


def compute_read_limit(budget_bytes: int, num_logs: int) -> int:
    """Bytes to read of each log."""
    return max(SMALLEST, min(LARGEST, budget_bytes // max(1, num_logs)))


def read_log(log: LogFile, limit_bytes: int) -> LogContent:
    """Head and tail of a log, at most `limit_bytes` of both.

    Raises:
        PrimusError: It cannot be read, or is not text.
    """
    if log.data is not None:
        rest = (_build_window(log.rest, len(log.data)),) if log.rest else ()
        return LogContent(windows=(_build_window(log.data, 0), *rest), mtime=log.time or 0.0)
    assert log.path is not None
    try:
        if log.path.suffix in COMPRESSED:
            parts, total, mtime, is_cut = _read_compressed_file(log.path, limit_bytes)
        else:
            parts, total, mtime, is_cut = *_read_plain_file(log.path, limit_bytes), False
    except OSError as error:
        raise PrimusError(f"{log.name}: cannot be read: {error.strerror or error}") from None
    except (EOFError, ValueError) as error:
        raise PrimusError(f"{log.name}: cannot be unpacked: {error}") from None
    if parts and _is_binary(parts[0][0]):
        raise PrimusError(f"{log.name}: is not text", "give a log file")
    note = (
        f"{log.name}: the file is truncated; its readable part was diagnosed"
        if is_cut
        else _describe_skipped_part(log.name, parts, total)
    )
    return LogContent(windows=tuple(_build_window(*part) for part in parts), note=note, mtime=mtime)


def _read_plain_file(path: Path, limit: int) -> tuple[list[tuple[bytes, int]], int, float]:
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        total = status.st_size
        if total <= limit:
            return [(_read_all_bytes(file, limit), 0)], total, status.st_mtime
        head = limit // HEAD_SHARE
        tail = limit - head
        return (
            [(os.pread(file.fileno(), head, 0), 0), (os.pread(file.fileno(), tail, total - tail), total - tail)],
            total,
            status.st_mtime,
        )


def _read_all_bytes(file: ReadableFile, limit: int) -> bytes:
    """All of a file that may still grow; the first `limit` bytes of one without a size, such as a pipe."""
    parts: list[bytes] = []
    left = limit
    while left > 0:
        part = file.read(min(left, CHUNK))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_stream_log(name: str, file: IO[bytes]) -> tuple[LogFile, str]:
    """A pipe's content as a log, and a note on the part that was skipped.

    Raises:
        PrimusError: It cannot be read, or is not text.
    """
    try:
        parts, total, num_skipped = _read_head_and_tail(file, LARGEST)
    except OSError as error:
        raise PrimusError(f"{name}: cannot be read: {error.strerror}") from None
    if _is_binary(parts[0][0]):
        raise PrimusError(f"{name}: is not text", "unpack it before: zcat LOG.gz | primus-cli direct -- diagnose -")
    data, rest = parts[0][0], b"".join(part for part, _ in parts[1:])
    before = data.count(b"\n") + num_skipped
    return LogFile(
        name=name, data=data, rest=rest, lines_before_rest=before, local_to_rank=None
    ), _describe_skipped_part(name, parts, total)


def _read_compressed_file(path: Path, limit: int) -> tuple[list[tuple[bytes, int]], int, float, bool]:
    with _open_compressed_file(path) as content:
        file = _TruncatedFileReader(content)
        parts, total, _ = _read_head_and_tail(file, limit)
        if file.is_cut and not total:
            raise EOFError("it is truncated at its beginning")
        return parts, total, path.stat().st_mtime, file.is_cut


def _read_head_and_tail(file: ReadableFile, limit: int) -> tuple[list[tuple[bytes, int]], int, int]:
    """Head and tail of a stream, each with its offset; the total size; the number of line ends between them."""
    begin = _read_all_bytes(file, limit // HEAD_SHARE)
    chunks: deque[bytes] = deque()
    total, kept, num_skipped = len(begin), 0, 0
    while chunk := file.read(CHUNK):
        chunks.append(chunk)
        total, kept = total + len(chunk), kept + len(chunk)
        while kept - len(chunks[0]) >= limit - limit // HEAD_SHARE:
            skipped = chunks.popleft()
            kept -= len(skipped)
            num_skipped += skipped.count(b"\n")
    tail = b"".join(chunks)
    if len(begin) + len(tail) == total:
        return [(begin + tail, 0)], total, 0
    return [(begin, 0), (tail, total - len(tail))], total, num_skipped


def _open_compressed_file(path: Path) -> IO[bytes]:
    """A compressed file's content.

    Raises:
        ValueError: The package that unpacks it is not installed.
    """
    if path.suffix == ".gz":
        import gzip

        return gzip.open(path)  # type: ignore[return-value]
    if path.suffix == ".bz2":
        import bz2

        return bz2.open(path)
    if path.suffix == ".xz":
        import lzma

        return lzma.open(path)
    try:
        import zstandard
    except ImportError:
        raise ValueError("the package zstandard is not installed; unpack it with `zstd -d`") from None
    return zstandard.open(path)  # type: ignore[no-any-return]


class _TruncatedFileReader:
    """A compressed file that may be truncated, because its writer was killed or is still writing."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file: Any = file
        self.is_cut = False

    def read(self, count: int, /) -> bytes:
        try:
            data: bytes = self._file.read1(count)  # `read` drops its buffer at the truncation
        except EOFError:
            self.is_cut = True
            return b""
        return data


def _is_binary(data: bytes) -> bool:
    """Whether it is not text. A few control characters, or a hole that a full disk left, are accepted."""
    sample = _HOLE.sub(b"", data)[:SAMPLE]
    return len(_ODD.findall(sample)) * 32 > len(sample)


def _describe_skipped_part(name: str, parts: Sequence[tuple[bytes, int]], total: int) -> str:
    read_bytes = sum(len(data) for data, _ in parts)
    if read_bytes >= total:
        return ""
    return (
        f"{name}: of {_format_mib(total)} the first {_format_mib(len(parts[0][0]))} and the last "
        f"{_format_mib(len(parts[-1][0]))} were read"
    )


def _format_mib(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count < 1024 * 1024 else f"{count / 1024 / 1024:.1f} MiB"


def _build_window(data: bytes, offset: int) -> LogWindow:
    if b"\x1b" in data:
        data = ANSI.sub(b"", data)
    return LogWindow(data, offset)


def count_lines_before(log: LogFile, offset: int) -> int:
    """Number of line ends in the first `offset` bytes of a log."""
    if offset == 0 or log.path is None:
        return log.lines_before_rest if offset else 0
    count = 0
    is_packed = log.path.suffix in COMPRESSED
    try:
        with _open_compressed_file(log.path) if is_packed else log.path.open("rb", buffering=0) as content:
            file = _TruncatedFileReader(content) if is_packed else content
            while offset > 0:
                chunk = file.read(min(CHUNK, offset))
                if not chunk:
                    break
                count += chunk.count(b"\n")
                offset -= len(chunk)
    except OSError:  # it was deleted since it was read: the count so far is used
        return count
    return count

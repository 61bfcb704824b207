"""The text of a log, in blocks of whole lines: from a file, a compressed file, or a pipe."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from primus.errors import UsageError

BLOCK = 1 << 19
"""Bytes that are read at once; the copies of larger blocks do not fit into the cache of a core."""
FIRST_BLOCK = 1 << 16
MAX_LINE = 16 * BLOCK
"""Bytes of a line; of a longer one only the end is read."""
MAX_HEAD = 1 << 26
"""Bytes of a pipe that are kept until its format is known."""
GZIP_MAGIC, XZ_MAGIC, BZIP2_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
"""Exceptions that the readers raise at the end of a file that is cut off, and where it is damaged."""
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""First bytes of a file of PowerShell."""
ESCAPES = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


class LogStream:
    """Bytes of a log, uncompressed. `rewind` starts again; of a pipe, what has been read is kept until then."""

    def __init__(self, path: str, file: io.BufferedIOBase | codecs.StreamRecoder, raw: io.BufferedIOBase) -> None:
        self.num_bytes = 0
        """Bytes that have been read since the start."""
        self.damage = ""
        """The reason why a compressed file could not be read to its end."""
        self._path = path
        self._file = file
        self._raw = raw
        self._kept: list[bytes] | None = None if raw.seekable() else []
        self._again: list[bytes] = []

    def __enter__(self) -> LogStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._raw.close()

    def read(self, size: int) -> bytes:
        """The next bytes, about `size` of them; none at the end."""
        data = self._again.pop() if self._again else self._read_file(size)
        self.num_bytes += len(data)
        if self._kept is not None:
            self._kept.append(data)
            if self.num_bytes > MAX_HEAD:
                raise UsageError(
                    f"{self._path}: no steps in the first {MAX_HEAD >> 20} MiB of a pipe", "name the format by --format"
                )
        return data

    def _read_file(self, size: int) -> bytes:
        """The next bytes; of a compressed file that is cut off or damaged, as many as can be read."""
        if not isinstance(self._file, gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File):
            return self._file.read(size)
        parts: list[bytes] = []
        while size > 0 and not self.damage:
            try:
                data = self._file.read1(size)
            except DAMAGE as error:
                self.damage = str(error) or type(error).__name__
                break
            if not data:
                break
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def rewind(self) -> None:
        """Read from the start again; for a pipe, only once."""
        if self._kept is None:
            self._file.seek(0)
        else:
            self._again, self._kept = self._kept[::-1], None
        self.num_bytes, self.damage = 0, ""


def open_log(path: Path) -> LogStream:
    """Open a log, which may be compressed by gzip, xz or bzip2.

    Raises:
        UsageError: It is compressed by zstd.
        OSError: It cannot be read.
    """
    raw = path.open("rb", buffering=0)
    buffered = io.BufferedReader(raw, BLOCK)
    head = buffered.peek(len(ZSTD_MAGIC))
    file: io.BufferedIOBase | codecs.StreamRecoder = buffered
    if head.startswith(ZSTD_MAGIC):
        buffered.close()
        raise UsageError(f"{path}: compressed by zstd", f"zstd -dc {path} | primus-cli direct -- compare extract -")
    if head.startswith(GZIP_MAGIC):
        file = gzip.GzipFile(fileobj=buffered)
    elif head.startswith(XZ_MAGIC):
        file = lzma.LZMAFile(buffered)  # noqa: SIM115 - `LogStream` closes it
    elif head.startswith(BZIP2_MAGIC):
        file = bz2.BZ2File(buffered)
    elif head.startswith(UTF_16_MARKS):
        file = codecs.EncodedFile(buffered, "utf-8", "utf-16", errors="replace")
    return LogStream(str(path), file, buffered)


def split_blocks(file: LogStream) -> Iterator[tuple[bytes, bool]]:
    """Lines of a file, in blocks that grow to about `BLOCK` bytes, and whether a newline ends the last one.

    Escapes of terminals are removed. Progress bars return to the start of the line: `\\r` separates lines as well.
    """
    rest, size = b"", FIRST_BLOCK
    while data := file.read(size):
        size = min(2 * size, BLOCK)
        place = data.rfind(b"\n")
        if place < 0:
            place = data.rfind(b"\r", 0, -1)  # the last one may be half of a newline
        if place < 0:
            rest += data
            if len(rest) > MAX_LINE:  # no text
                rest = rest[-size:]
            continue
        block, rest = rest + data[:place], data[place + 1 :]
        yield _separate_lines(block), True
    if rest:
        yield _separate_lines(rest), False


def _separate_lines(block: bytes) -> bytes:
    if b"\x1b" in block:
        block = ESCAPES.sub(b"", block)
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return block


def select_lines(block: bytes, anchors: Sequence[bytes]) -> list[bytes]:
    """The lines that contain one of the anchors."""
    if len(anchors) > 1:
        return [line for line in block.split(b"\n") if any(anchor in line for anchor in anchors)]
    chosen = []
    place = block.find(anchors[0])
    while place >= 0:
        start, end = block.rfind(b"\n", 0, place) + 1, block.find(b"\n", place)
        if end < 0:
            chosen.append(block[start:])
            break
        chosen.append(block[start:end])
        place = block.find(anchors[0], end)
    return chosen

"""Compressed files as streams of what is in them; a truncated one is an error, not less text."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from typing import Any, BinaryIO

from primus.data.readers.kinds import detect_compression
from primus.errors import UsageError

BUFFER = 1 << 20

DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)
"""What a stream raises whose content ends too early or makes no sense."""


def open_decompressed(file: str, stream: BinaryIO) -> BinaryIO:
    """The content of `stream`, decompressed as the name of its file says.

    Raises:
        UsageError: The package for this compression is not installed.
    """
    suffix = detect_compression(file)
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), BUFFER)  # type: ignore[arg-type]
    if suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(stream), BUFFER)  # type: ignore[arg-type]
    if suffix == ".bz2":
        return io.BufferedReader(_Bzip2Stream(stream), BUFFER)
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardStream(file, stream), BUFFER)
    return stream


def import_zstandard(file: str) -> Any:
    """The package zstandard.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import zstandard as library
    except ImportError:
        raise UsageError(f"{file}: .zst needs the package zstandard", "pip install zstandard") from None
    return library


class _Bzip2Stream(io.RawIOBase):
    """Decompressed content of a .bz2, whose library says OSError for damage as if the disk were at fault."""

    def __init__(self, stream: BinaryIO) -> None:
        self._file = bz2.BZ2File(stream)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._file.readinto(buffer)
        except OSError as error:
            if error.errno is not None:
                raise
            raise EOFError(str(error)) from None


class _ZstandardStream(io.RawIOBase):
    """Decompressed content of a .zst of any number of frames; unlike the library's reader it notices truncation."""

    def __init__(self, file: str, stream: BinaryIO) -> None:
        self._library = import_zstandard(file)
        self._stream = stream
        self._frame: Any = None
        self._ready = memoryview(b"")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._rest or self._stream.read(BUFFER)
            if not chunk and self._frame is None:
                return 0
            if not chunk:
                raise EOFError("the last zstd frame is not complete")
            self._ready = memoryview(self._decompress_chunk(chunk))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress_chunk(self, chunk: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            content: bytes = self._frame.decompress(chunk)
        except self._library.ZstdError as error:
            raise EOFError(str(error)) from None
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return content

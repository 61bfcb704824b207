"""Open compressed files as streams of their content; a truncated file is an error, not a shorter text."""

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
"""Exceptions of a stream whose content is truncated or invalid."""


def open_decompressed(file: str, stream: BinaryIO) -> BinaryIO:
    """Open the decompressed content of `stream`; the suffix of the file determines the format.

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
    """Import the package zstandard.

    Raises:
        UsageError: The package is not installed.
    """
    try:
        import zstandard as library
    except ImportError:
        raise UsageError(f"{file}: .zst needs the package zstandard", "pip install zstandard") from None
    return library


class _Bzip2Stream(io.RawIOBase):
    """Decompressed content of a .bz2. The library reports damage as OSError without errno; this raises EOFError."""

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
    """Decompressed content of a .zst with any number of frames; unlike the library's reader, it detects truncation.

    State: `_frame` decompresses the current frame (None between frames), `_ready` is decompressed content that has not
    been read, and `_rest` is input after the end of the last frame. The file is complete if it ends between frames.
    """

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
            # 2 GiB is the largest window of the zstd tool (--long=31); the default limit rejects such files.
            self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            content: bytes = self._frame.decompress(chunk)
        except self._library.ZstdError as error:
            raise EOFError(str(error)) from None
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return content

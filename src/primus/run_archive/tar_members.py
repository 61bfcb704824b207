"""Members of a tar file: regular files only, one after the other, without the extensions that hide names and sizes.

Python's tarfile follows links and reads extended headers of any length into memory. An archive of a run has neither:
headers are POSIX.1-1988 (ustar), so each costs 512 bytes, and everything else is refused before it has an effect.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO

from primus.errors import PrimusError

BLOCK = tarfile.BLOCKSIZE
CHUNK = 1 << 20
LARGEST_OCTAL = 8**11 - 1
"""Largest size that the field of ustar holds in octal digits."""
KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.DIRTYPE: "a folder",
}
_END = b"\0" * BLOCK


def format_header(name: str, size: int, time_s: int) -> bytes:
    """The header of a regular file.

    Raises:
        PrimusError: The name is too long.
    """
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = min(size, LARGEST_OCTAL), time_s, 0o644
    try:
        header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    except ValueError:
        raise PrimusError(f"{name}: the name is too long for an archive", "shorten the names of folders") from None
    if size > LARGEST_OCTAL:  # base-256, as GNU tar, bsdtar and Python write and read it
        header[124:136] = b"\x80" + size.to_bytes(11, "big")
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def pad(size: int) -> bytes:
    """What follows a file of `size` bytes, up to the next block."""
    return b"\0" * (-size % BLOCK)


END = _END * 2
"""The end of an archive."""


class TarReader:
    """Reads members in their order; the content of one must be read before the next one is asked for."""

    def __init__(self, stream: BinaryIO, archive: str) -> None:
        self._stream, self._archive = stream, archive
        self._left = 0
        self._padding = 0

    def read_header(self) -> tuple[str, int] | None:
        """Name and size of the next member; None at the end.

        Raises:
            PrimusError: It is not a regular file, or the archive is truncated or damaged.
        """
        assert not self._left, "the content of the member before was read"
        self._read_exactly(self._padding)
        block = self._read_exactly(BLOCK)
        if block == _END:
            return None
        try:
            # Strict about bytes that are not UTF-8: such a name cannot be in a manifest.
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError):
            raise PrimusError(f"{self._archive}: damaged: not a header of tar", "copy the archive again") from None
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.linkname:
            kind = KINDS.get(info.type, "an extended header")
            raise PrimusError(
                f"{self._archive}: {info.name!r} is {kind}; an archive of a run has regular files only",
                "do not use it: no export writes one",
            )
        self._left, self._padding = info.size, -info.size % BLOCK
        return info.name, info.size

    def read_content(self) -> Iterator[bytes]:
        """The content of the member whose header was read, in chunks."""
        while self._left:
            chunk = self._read_exactly(min(self._left, CHUNK))
            self._left -= len(chunk)
            yield chunk

    def _read_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._stream.read(size)
            if not part:
                raise PrimusError(f"{self._archive}: truncated", "copy the archive again")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

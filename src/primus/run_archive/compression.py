"""Compressed files by their ending: .tar.gz and .tar.xz everywhere, .tar.zst by the package or the program zstd."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import lzma
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, cast

from primus.data.readers.compression import DAMAGED, open_decompressed
from primus.errors import PrimusError, UnfitError, UsageError

ENDINGS = (".tar.zst", ".tar.gz", ".tar.xz")
LEVEL = 6
"""Of gzip, zstd and xz, whose range this level suits."""
_PROGRAM = "zstd"


def check_ending(file: Path) -> str:
    """The ending of an archive's name.

    Raises:
        UsageError: It is another one.
        UnfitError: Nothing on this machine reads and writes .zst.
    """
    ending = next((ending for ending in ENDINGS if file.name.endswith(ending)), None)
    if ending is None:
        raise UsageError(f"{file}: the name of an archive ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if ending == ".tar.zst" and not _has_package() and shutil.which(_PROGRAM) is None:
        raise UnfitError(
            f"{file}: .zst needs the package zstandard or the program zstd, and neither is installed",
            "pip install zstandard, or name a .tar.gz",
        )
    return ending


def open_writer(file: Path, ending: str) -> AbstractContextManager[BinaryIO]:
    """Open `file` for the content of an archive with `ending`."""
    if ending == ".tar.gz":
        return _write_gzip(file)
    if ending == ".tar.xz":
        return cast(AbstractContextManager[BinaryIO], lzma.LZMAFile(file, "w", preset=LEVEL))
    return _write_zst(file) if _has_package() else _run_zstd(file, is_reader=False)


@contextlib.contextmanager
def open_reader(file: Path, ending: str) -> Iterator[BinaryIO]:
    """Open the content of an archive; damage of the compression while it is open is one message.

    Raises:
        PrimusError: The file cannot be read, or is damaged.
    """
    try:
        if ending == ".tar.zst" and not _has_package():
            with _run_zstd(file, is_reader=True) as stream:
                yield stream
        else:
            with file.open("rb") as raw, open_decompressed(file.name, raw) as stream:
                yield stream
    except DAMAGED as error:
        raise PrimusError(f"{file}: damaged: {error}", "copy the archive again") from None
    except OSError as error:
        raise PrimusError(f"{file}: cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def _write_gzip(file: Path) -> Iterator[BinaryIO]:
    # Without name and time, so that the same run gives the same bytes.
    with file.open("wb") as raw, gzip.GzipFile("", "wb", LEVEL, cast(BinaryIO, raw), mtime=0) as stream:
        yield cast(BinaryIO, stream)


@contextlib.contextmanager
def _write_zst(file: Path) -> Iterator[BinaryIO]:
    import zstandard  # optional

    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    with file.open("wb") as raw, compressor.stream_writer(raw, closefd=False) as stream:
        yield cast(BinaryIO, stream)


@contextlib.contextmanager
def _run_zstd(file: Path, *, is_reader: bool) -> Iterator[BinaryIO]:
    """The program zstd between `file` and this process."""
    mode, words = ("rb", ["-dcq"]) if is_reader else ("wb", [f"-{LEVEL}cq"])
    with file.open(mode) as raw:
        pipes = {"stdin": raw, "stdout": subprocess.PIPE} if is_reader else {"stdin": subprocess.PIPE, "stdout": raw}
        child = subprocess.Popen([_PROGRAM, *words], stderr=subprocess.PIPE, **pipes)  # type: ignore[call-overload]
        try:
            yield child.stdout if is_reader else child.stdin
            # A reader of the whole content is at its end: the program has ended, or is about to.
            with contextlib.suppress(BrokenPipeError):
                (child.stdout if is_reader else child.stdin).close()
            problem = child.stderr.read().decode(errors="replace").strip()
            if child.wait():
                raise PrimusError(f"{file}: {problem or 'zstd failed'}", "copy the archive again" if is_reader else "")
        finally:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                with contextlib.suppress(OSError, ValueError):
                    if stream:
                        stream.close()


def _has_package() -> bool:
    return importlib.util.find_spec("zstandard") is not None

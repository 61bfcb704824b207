"""Redaction of standard output, standard error and logs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from primus.redaction.forms import has_shape
from primus.redaction.known import list_known_literals, redact


class RedactingStream:
    """A text stream that masks secrets in written text; everything else is delegated to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._naming_errors():
            self._stream.write(redact(text))
        # The length of the original text, which callers compare with what they passed.
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._naming_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Add the name of the stream to an error such as that of a full disk; the OSError does not contain it."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or getattr(self._stream, "name", None)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redacting(stream: TextIO) -> TextIO:
    """`stream` with redaction; a stream that has it already is returned as it is."""
    return stream if isinstance(stream, RedactingStream) else cast(TextIO, RedactingStream(stream))


@contextlib.contextmanager
def redirected_streams() -> Iterator[None]:
    """Redact standard output and error of this process while open."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = redacting(sys.stdout), redacting(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def redact_file(path: Path) -> None:
    """Remove secrets from a log whose writers have ended; a log without secrets is not changed.

    Python output of a worker is redacted when it is written. This function covers C libraries and child processes,
    which write to the file directly.
    """
    try:
        if not path.is_file() or path.is_symlink() or not _may_hold_secret(path):
            return
        # Written next to the log and renamed, so that a reader never sees half of it, and a failure leaves the
        # original.
        temporary = path.with_name(f".{path.name}.tmp.{os.getpid()}")
        with path.open("rb") as source, temporary.open("wb") as target:
            for line in source:
                text = line.decode("utf-8", "surrogateescape")
                target.write(redact(text).encode("utf-8", "surrogateescape"))
        os.replace(temporary, path)
    except OSError as error:
        print(f"{path}: secrets in it cannot be redacted: {error.strerror}", file=sys.stderr)


def _may_hold_secret(path: Path) -> bool:
    import mmap

    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # Two passes: known values in mapped memory, which is fast, then secrets by form, line by line.
        if any(content.find(literal.encode("utf-8", "surrogateescape")) >= 0 for literal in list_known_literals()):
            return True
    with path.open(encoding="utf-8", errors="replace") as lines:
        return any(has_shape(line) or "://" in line for line in lines)

"""Documents as compressed JSON lines, the form in which one stage of text leaves them to the next."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from primus.data.readers import TextDocument

SUFFIX = "jsonl.zst"
LEVEL = 3
"""Of zstd: its default."""

_encoder = msgspec.json.Encoder(enc_hook=str)


@dataclass
class DocumentWriter:
    """Writes one record for each document: its text, then the fields that came with it."""

    file: BinaryIO
    key: str
    """Field of the text."""
    documents: int = 0
    text_bytes: int = 0
    """UTF-8 of the texts."""

    def write(self, document: TextDocument, text: str | None = None) -> None:
        """Write a document, or `text` in the place of its text."""
        text = document.text if text is None else text
        record: dict[str, Any] = {self.key: text, **(document.fields or {})}
        try:
            line = _encoder.encode(record)
        except UnicodeEncodeError:
            line = _encoder.encode(_make_encodable(record))
        self.file.write(line)
        self.file.write(b"\n")
        self.documents += 1
        self.text_bytes += len(text) if text.isascii() else len(text.encode())


def _make_encodable(value: Any) -> Any:
    """A value in which what is no character, such as half of a surrogate pair, is U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_make_encodable(name): _make_encodable(each) for name, each in value.items()}
    return [_make_encodable(each) for each in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def open_writer(path: Path, key: str, compression: str = "zst") -> Iterator[DocumentWriter]:
    """A writer of a new file, which is complete after the block.

    Args:
        path: The file.
        key: Field of the text.
        compression: ``zst``, ``gz`` or ``none``.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("wb") as raw:
        if compression == "none":
            yield DocumentWriter(raw, key)
            return
        with _open_compressed(raw, compression) as file:
            yield DocumentWriter(file, key)


def _open_compressed(raw: BinaryIO, compression: str) -> Any:
    """A file that compresses what is written to it; equal content gives equal bytes."""
    if compression == "gz":
        return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).stream_writer(raw, closefd=False)

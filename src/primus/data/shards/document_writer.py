"""Write documents as compressed JSON lines, the exchange format between text stages."""

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
"""Compression level; the default of zstd."""

_encoder = msgspec.json.Encoder(enc_hook=str)


@dataclass
class DocumentWriter:
    """Writes one record per document: the text, then the other fields of the input record."""

    file: BinaryIO
    key: str
    """Name of the text field."""
    documents: int = 0
    text_bytes: int = 0
    """Size of the texts in UTF-8."""

    def write(self, document: TextDocument, text: str | None = None) -> None:
        """Write a document; `text` replaces its text if given."""
        text = document.text if text is None else text
        record: dict[str, object] = {self.key: text, **(document.fields or {})}
        try:
            line = _encoder.encode(record)
        except UnicodeEncodeError:
            line = _encoder.encode(_make_encodable(record))
        self.file.write(line)
        self.file.write(b"\n")
        self.documents += 1
        self.text_bytes += len(text) if text.isascii() else len(text.encode())


def _make_encodable(value: Any) -> Any:
    """Copy of a value in which code points that UTF-8 cannot encode (lone surrogates) are replaced by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_make_encodable(name): _make_encodable(each) for name, each in value.items()}
    return [_make_encodable(each) for each in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def open_writer(path: Path, key: str, compression: str = "zst") -> Iterator[DocumentWriter]:
    """Open a writer of a new file. The file is complete when the block ends.

    Args:
        path: The file.
        key: Name of the text field.
        compression: ``zst``, ``gz`` or ``none``.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("wb") as raw:
        if compression == "none":
            yield DocumentWriter(raw, key)
            return
        with _open_compressed(raw, compression) as file:
            yield DocumentWriter(file, key)


def _open_compressed(raw: BinaryIO, compression: str) -> Any:
    """A file object that compresses its input. Equal content gives equal bytes: gzip stores no name and no time."""
    if compression == "gz":
        return gzip.GzipFile("", "wb", fileobj=raw, mtime=0)
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).stream_writer(raw, closefd=False)

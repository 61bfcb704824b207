"""Documents that have been read, and bad documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from primus.data.readers.lines import UTF_16_MARKS
from primus.data.readers.locations import locate_document
from primus.data.readers.shard import FilePart


class TextDocument(Struct, frozen=True, eq=False, gc=False):
    """A document, or a piece of a long one. Equality ignores the location."""

    text: str
    begins: bool = True
    ends: bool = True
    fields: Mapping[str, object] | None = None
    """Other fields of the record, if requested."""
    part: FilePart | None = None
    """File part that contains the document."""
    number: int = 0
    """Line or row in the part, from 1."""

    @property
    def where(self) -> str:
        """File and line, or file and row; computed on access, because it may have to count lines."""
        return locate_document(self.part, self.number) if self.part else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextDocument) and _list_fields(self) == _list_fields(other)

    def __hash__(self) -> int:
        return hash((self.text, self.begins, self.ends))


def _list_fields(text: TextDocument) -> tuple[object, ...]:
    return text.text, text.begins, text.ends, text.fields


@dataclass(frozen=True)
class BadDocument:
    """Input that is not a valid document."""

    where: str
    """File and line."""
    reason: str
    """Why the document is invalid."""


def decode_line(line: bytes) -> str | BadDocument:
    """Decode a line as UTF-8; a BadDocument without a location if that fails."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        if line.startswith(UTF_16_MARKS):
            return BadDocument("", "UTF-16, not UTF-8: convert the file by iconv -f UTF-16 -t UTF-8")
        return BadDocument("", f"not UTF-8 at byte {error.start + 1} of the line")

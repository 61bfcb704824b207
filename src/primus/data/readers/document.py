"""A document that was read, or what could not be one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from primus.data.readers.lines import UTF_16_MARKS
from primus.data.readers.locations import locate_document
from primus.data.readers.shard import FilePart


class TextDocument(Struct, frozen=True, eq=False, gc=False):
    """A document, or a piece of a long one. Equal where the text is, wherever it was read."""

    text: str
    begins: bool = True
    ends: bool = True
    fields: dict[str, Any] | None = None
    """What else its record has, where that was asked for."""
    part: FilePart | None = None
    """What it was read from."""
    number: int = 0
    """Its line or row in the part, from 1."""

    @property
    def where(self) -> str:
        """File and line, or file and row; found out when it is asked for."""
        return locate_document(self.part, self.number) if self.part else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextDocument) and _list_fields(self) == _list_fields(other)

    def __hash__(self) -> int:
        return hash((self.text, self.begins, self.ends))


def _list_fields(text: TextDocument) -> tuple[Any, ...]:
    return text.text, text.begins, text.ends, text.fields


@dataclass(frozen=True)
class BadDocument:
    """Something that should have been a document."""

    where: str
    """File and line."""
    reason: str
    """What is wrong with it."""


def decode_line(line: bytes) -> str | BadDocument:
    """The text of a line in UTF-8, else why it is none."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        if line.startswith(UTF_16_MARKS):
            return BadDocument("", "UTF-16, not UTF-8: convert the file by iconv -f UTF-16 -t UTF-8")
        return BadDocument("", f"not UTF-8 at byte {error.start + 1} of the line")

"""Read documents from text files: the whole file in pieces, its paragraphs or its lines."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Iterator
from typing import BinaryIO

from primus.data.readers.document import BadDocument, TextDocument, decode_line
from primus.data.readers.lines import BYTE_ORDER_MARK, number_lines, read_whole_lines
from primus.data.readers.locations import locate_document
from primus.data.readers.records import describe_long_line
from primus.data.readers.shard import FilePart

SMALLEST_PIECE = 1 << 16
LARGEST_PIECE = 1 << 20
PIECES_OF_A_FILE = 64
LONGEST_OVERHANG = 1 << 20
"""Maximum number of bytes after a piece up to the end of its last line; a longer line is cut."""


def read_line_documents(
    part: FilePart, groups: Iterable[list[bytes | None]], longest: int
) -> Iterator[TextDocument | BadDocument]:
    """Read each line that is not blank as a document."""
    for number, line in _decode_lines(part, number_lines(groups), longest):
        if isinstance(line, BadDocument):
            yield line
        elif line.strip():
            yield TextDocument(line.rstrip("\r"), part=part, number=number)


def read_paragraph_documents(part: FilePart, stream: BinaryIO, longest: int) -> Iterator[TextDocument | BadDocument]:
    """Read the text between blank lines as documents; a paragraph of more than `longest` bytes becomes several."""
    paragraph: list[str] = []
    begin = size = 0
    for number, line in _decode_lines(part, enumerate(read_whole_lines(stream, longest), 1), longest):
        if isinstance(line, BadDocument):
            yield line
            continue
        if paragraph and (not line.strip() or size > longest):
            yield TextDocument("".join(paragraph), part=part, number=begin)
            paragraph, size = [], 0
        if line.strip():
            begin = begin if paragraph else number
            paragraph.append(line)
            size += len(line)
    if paragraph:
        yield TextDocument("".join(paragraph), part=part, number=begin)


def read_file_documents(
    part: FilePart, stream: BinaryIO, piece_bytes: int | None
) -> Iterator[TextDocument | BadDocument]:
    """Read the whole file in pieces of about `piece_bytes`, cut at line ends or, in a very long line, at a space."""
    # A piece is held until the next one exists: only then is it known that it does not end the document.
    held, held_at = "", 1
    begins, number = True, 1
    pieces = _read_pieces(stream, piece_bytes) if piece_bytes else iter([stream.read()])
    for count, content in enumerate(pieces):
        if count:
            yield TextDocument(held, begins, False, None, part, held_at)
            begins = False
        content = content if count else content.removeprefix(BYTE_ORDER_MARK)
        good = decode_line(content)
        if isinstance(good, BadDocument):
            good = yield from _decode_good_lines(part, content, number)
        held, held_at = good, number
        number += content.count(b"\n")
    yield TextDocument(held, begins, True, None, part, held_at)


def choose_piece_size(file_bytes: int) -> int:
    """Choose the size of the pieces of a file in bytes, so that there are pieces to shuffle."""
    return min(max(file_bytes // PIECES_OF_A_FILE, SMALLEST_PIECE), LARGEST_PIECE)


def _read_pieces(stream: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
    rest = b""
    while content := rest + stream.read(piece_bytes - len(rest)):
        rest = b""
        if not content.endswith(b"\n"):
            line = stream.readline(LONGEST_OVERHANG)
            content += line
            if len(line) == LONGEST_OVERHANG and not line.endswith(b"\n"):
                cut = _find_cut(content)
                content, rest = content[:cut], content[cut:]
        yield content


def _find_cut(content: bytes) -> int:
    """Offset at which to cut a text without line ends: before its last space, or before an incomplete character."""
    space = max(content.rfind(b" "), content.rfind(b"\t"))
    if space > 0:
        return space
    cut = len(content)
    while cut > len(content) - 4 and content[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if content[cut - 1] >= 0xC0 else len(content)


def _decode_good_lines(part: FilePart, content: bytes, number: int) -> Generator[BadDocument, None, str]:
    good = []
    for at, line in enumerate(io.BytesIO(content), number):
        text = decode_line(line)
        if isinstance(text, BadDocument):
            yield BadDocument(locate_document(part, at), text.reason)
        else:
            good.append(text)
    return "".join(good)


def _decode_lines(
    part: FilePart, lines: Iterable[tuple[int, bytes | None]], longest: int
) -> Iterator[tuple[int, str | BadDocument]]:
    for number, line in lines:
        if line is None:
            yield number, BadDocument(locate_document(part, number), describe_long_line(longest))
            continue
        text = decode_line(line)
        yield number, BadDocument(locate_document(part, number), text.reason) if isinstance(text, BadDocument) else text

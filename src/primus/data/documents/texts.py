"""Documents of text files: the file in pieces, its paragraphs or its lines."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Iterator
from typing import BinaryIO

from primus.data.documents.document import Bad, Text, decoded
from primus.data.documents.lines import BYTE_ORDER_MARK, numbered, whole_lines
from primus.data.documents.places import place
from primus.data.documents.records import too_long
from primus.data.pipeline.shards import Part

SMALLEST_PIECE = 1 << 16
LARGEST_PIECE = 1 << 20
PIECES_OF_A_FILE = 64
LONGEST_OVERHANG = 1 << 20
"""Bytes after the end of a piece in which a line may end; a longer line is cut."""


def by_line(part: Part, groups: Iterable[list[bytes | None]], longest: int) -> Iterator[Text | Bad]:
    """Each line that is not empty."""
    for number, line in _decoded_lines(part, numbered(groups), longest):
        if isinstance(line, Bad):
            yield line
        elif line.strip():
            yield Text(line.rstrip("\r"), part=part, number=number)


def by_paragraph(part: Part, stream: BinaryIO, longest: int) -> Iterator[Text | Bad]:
    """What is between empty lines; a paragraph of more than `longest` bytes becomes several."""
    paragraph: list[str] = []
    begin = size = 0
    for number, line in _decoded_lines(part, enumerate(whole_lines(stream, longest), 1), longest):
        if isinstance(line, Bad):
            yield line
            continue
        if paragraph and (not line.strip() or size > longest):
            yield Text("".join(paragraph), part=part, number=begin)
            paragraph, size = [], 0
        if line.strip():
            begin = begin if paragraph else number
            paragraph.append(line)
            size += len(line)
    if paragraph:
        yield Text("".join(paragraph), part=part, number=begin)


def by_file(part: Part, stream: BinaryIO, piece_bytes: int | None) -> Iterator[Text | Bad]:
    """The whole file, in pieces of about `piece_bytes` that end where a line ends, or a very long line has a space."""
    held, held_at = "", 1
    begins, number = True, 1
    pieces = _pieces(stream, piece_bytes) if piece_bytes else iter([stream.read()])
    for count, content in enumerate(pieces):
        if count:
            yield Text(held, begins, False, None, part, held_at)
            begins = False
        content = content if count else content.removeprefix(BYTE_ORDER_MARK)
        good = decoded(content)
        if isinstance(good, Bad):
            good = yield from _good_lines(part, content, number)
        held, held_at = good, number
        number += content.count(b"\n")
    yield Text(held, begins, True, None, part, held_at)


def piece_size(file_bytes: int) -> int:
    """Bytes of a piece of a file, such that a file of any size has some that can be shuffled."""
    return min(max(file_bytes // PIECES_OF_A_FILE, SMALLEST_PIECE), LARGEST_PIECE)


def _pieces(stream: BinaryIO, piece_bytes: int) -> Iterator[bytes]:
    rest = b""
    while content := rest + stream.read(piece_bytes - len(rest)):
        rest = b""
        if not content.endswith(b"\n"):
            line = stream.readline(LONGEST_OVERHANG)
            content += line
            if len(line) == LONGEST_OVERHANG and not line.endswith(b"\n"):
                cut = _place_to_cut(content)
                content, rest = content[:cut], content[cut:]
        yield content


def _place_to_cut(content: bytes) -> int:
    """Where the last word of a text without line ends begins, with its space; else where its last character does."""
    space = max(content.rfind(b" "), content.rfind(b"\t"))
    if space > 0:
        return space
    cut = len(content)
    while cut > len(content) - 4 and content[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if content[cut - 1] >= 0xC0 else len(content)


def _good_lines(part: Part, content: bytes, number: int) -> Generator[Bad, None, str]:
    good = []
    for at, line in enumerate(io.BytesIO(content), number):
        text = decoded(line)
        if isinstance(text, Bad):
            yield Bad(place(part, at), text.reason)
        else:
            good.append(text)
    return "".join(good)


def _decoded_lines(
    part: Part, lines: Iterable[tuple[int, bytes | None]], longest: int
) -> Iterator[tuple[int, str | Bad]]:
    for number, line in lines:
        if line is None:
            yield number, Bad(place(part, number), too_long(longest))
            continue
        text = decoded(line)
        yield number, Bad(place(part, number), text.reason) if isinstance(text, Bad) else text

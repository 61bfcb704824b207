"""Read the lines of a file, or of a byte range of it, in groups and with a maximum length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

BLOCK = 1 << 20
"""Bytes of one read."""
END_OF_LINE = 1 << 16
"""Bytes of one read after a range, to find the end of its last line: most lines are much shorter."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF_16_MARKS = b"\xff\xfe", b"\xfe\xff"


def read_line_groups(stream: BinaryIO, first: int, last: int | None, longest: int) -> Iterator[list[bytes | None]]:
    """Yield groups of lines without their newlines; None replaces a line of more than `longest` bytes.

    Args:
        stream: The file; seekable if `first` is not 0.
        first: First byte of the range. A line belongs to the range that contains its first byte.
        last: One past the last byte; None for the end of the file.
        longest: Maximum length of a line in bytes.
    """
    # `held` has the pieces of the current line, whose end has not been read, and `size` their length. The pieces of a
    # line that is too long are dropped, but its length is still counted: the line becomes None at its end.
    held: list[bytes] = []
    size = 0
    unmarked = first > 0
    for chunk in read_chunks(stream, first, last):
        lines: list[bytes | None] = list(chunk.split(b"\n"))
        held.append(lines[0] or b"")
        size += len(held[-1])
        if size > longest:
            held.clear()
        if len(lines) == 1:
            continue
        lines[0] = _join_pieces(held, size, longest, unmarked)
        unmarked = True
        rest = lines.pop() or b""
        yield [line if line is None or len(line) <= longest else None for line in lines] if longest < BLOCK else lines
        held, size = [rest], len(rest)
    if size:
        yield [_join_pieces(held, size, longest, unmarked)]


def _join_pieces(held: list[bytes], size: int, longest: int, unmarked: bool) -> bytes | None:
    """Join the pieces of a line and remove a byte order mark; None if the line is too long."""
    if size > longest:
        return None
    line = b"".join(held)
    return line if unmarked else line.removeprefix(BYTE_ORDER_MARK)


def read_chunks(stream: BinaryIO, first: int, last: int | None) -> Iterator[bytes]:
    """Yield the bytes of the lines that begin in a range, in blocks."""
    position = max(first - 1, 0)  # a newline just before the range means that a line begins with the range
    if first:
        stream.seek(position)
        position = _skip_line(stream, position, last)
    while (last is None or position < last) and (chunk := stream.read(_choose_block_size(position, last))):
        yield chunk
        position += len(chunk)
        if last is not None and position >= last and not chunk.endswith(b"\n"):
            yield from _read_to_line_end(stream)
            return


def _choose_block_size(position: int, last: int | None) -> int:
    return BLOCK if last is None else min(BLOCK, last - position)


def _skip_line(stream: BinaryIO, position: int, last: int | None) -> int:
    """Seek to the byte after the next newline, but not far past `last`; return the new position."""
    while chunk := stream.read(END_OF_LINE):
        end = chunk.find(b"\n") + 1
        if end:
            stream.seek(position + end)
            return position + end
        position += len(chunk)
        if last is not None and position >= last:
            break
    return position


def _read_to_line_end(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(END_OF_LINE):
        end = chunk.find(b"\n") + 1
        if end:
            yield chunk[:end]
            return
        yield chunk


def number_lines(groups: Iterable[list[bytes | None]]) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number, from 1."""
    return enumerate((line for lines in groups for line in lines), 1)


def read_whole_lines(stream: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """Yield the lines of a file with their newlines; None replaces a line of more than `longest` bytes."""
    first = True
    while line := stream.readline(longest + 1):
        if len(line) > longest and not line.endswith(b"\n"):
            yield None
            while (more := stream.readline(BLOCK)) and not more.endswith(b"\n"):
                pass
        else:
            yield line.removeprefix(BYTE_ORDER_MARK) if first else line
        first = False

"""Read documents from .csv and .tsv tables, whose first line names the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO

from primus.data.readers.document import BadDocument, TextDocument
from primus.data.readers.kinds import detect_kind
from primus.data.readers.lines import UTF_16_MARKS, read_whole_lines
from primus.data.readers.locations import locate_document
from primus.data.readers.records import describe_long_line
from primus.data.readers.shard import FilePart
from primus.errors import UsageError, did_you_mean


def read_table(
    part: FilePart, stream: BinaryIO, key: str, fields: bool, longest: int
) -> Iterator[TextDocument | BadDocument]:
    """Read the text of each row; a row may have line ends inside quotes.

    Args:
        part: The file.
        stream: Content of the file.
        key: Column that holds the text.
        fields: Return the other columns too.
        longest: Maximum length of a line and of a cell in bytes.

    Raises:
        UsageError: The column does not exist.
    """
    table = _TableReader(part, stream, longest)
    header = table.read_header()
    if key not in header:
        raise UsageError(f"{part.file}: no column '{key}'", did_you_mean(key, header) or "it has no columns")
    if header.count(key) > 1:
        raise UsageError(f"{part.file}: {header.count(key)} columns are named '{key}'", "rename all but one")
    column = header.index(key)
    for number, row in table.read_rows():
        yield from table.take_bad()
        if isinstance(row, BadDocument):
            yield row
        elif row:
            yield _convert_row(part, number, row, header, column, fields)
    yield from table.take_bad()


def read_column_names(file: str, stream: BinaryIO) -> list[str]:
    """Names of the columns of a table."""
    return _TableReader(FilePart(file), stream, 1 << 20).read_header()


class _TableReader:
    """Reads the rows of a table and the line at which each row begins.

    State: `_number` counts the lines that the csv reader has consumed; `_begin` is the first line of the current row (0
    before its first line), because a quoted cell may span lines.
    """

    def __init__(self, part: FilePart, stream: BinaryIO, longest: int) -> None:
        csv.field_size_limit(longest)  # global in the csv module, with a default of 131072 characters
        self._part = part
        self._lines = read_whole_lines(stream, longest)
        self._longest = longest
        self._number = self._begin = 0
        self._bad: list[BadDocument] = []
        dialect = csv.excel_tab if detect_kind(part.file) == ".tsv" else csv.excel
        self._reader = csv.reader(self._decode_lines(), dialect, strict=True)

    def read_header(self) -> list[str]:
        """Read the cells of the first row that is not empty.

        Raises:
            UsageError: The file is UTF-16.
        """
        row = next((row for _, row in self.read_rows() if isinstance(row, list) and row), [])
        if row and row[0].encode(errors="surrogateescape").startswith(UTF_16_MARKS):
            raise UsageError(f"{self._part.file}: UTF-16, not UTF-8", "convert it by iconv -f UTF-16 -t UTF-8")
        return row

    def read_rows(self) -> Iterator[tuple[int, list[str] | BadDocument]]:
        """Yield each remaining row with its first line."""
        while True:
            self._begin = 0
            try:
                row = next(self._reader)
                yield self._begin, row
            except StopIteration:
                return
            except csv.Error as error:
                begin = self._begin
                lines = f" (lines {begin} to {self._number})" if self._number > begin else ""
                yield begin, BadDocument(locate_document(self._part, begin), f"not a row of a table, {error}{lines}")

    def take_bad(self) -> list[BadDocument]:
        """Return, and forget, the lines that were dropped since the last call because they are too long."""
        bad, self._bad = self._bad, []
        return bad

    def _decode_lines(self) -> Iterator[str]:
        for line in self._lines:
            self._number += 1
            if line is None:
                self._bad.append(
                    BadDocument(locate_document(self._part, self._number), describe_long_line(self._longest))
                )
            else:
                # Invalid UTF-8 becomes surrogates here; `_convert_row` reports it for the row that contains it.
                self._begin = self._begin or self._number
                yield line.decode(errors="surrogateescape")


def _convert_row(
    part: FilePart, number: int, row: list[str], header: list[str], column: int, fields: bool
) -> TextDocument | BadDocument:
    if len(row) != len(header):
        return BadDocument(locate_document(part, number), f"{len(row)} columns where the header has {len(header)}")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:
        return BadDocument(locate_document(part, number), f"not UTF-8 at character {error.start + 1} of the text")
    rest = {name: cell for name, cell in zip(header, row, strict=True) if name != header[column]} if fields else None
    return TextDocument(row[column], True, True, rest, part, number)

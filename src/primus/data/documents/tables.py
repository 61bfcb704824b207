"""Documents of .csv and .tsv tables, whose first line names the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO

from primus.data.documents.document import Bad, Text
from primus.data.documents.kinds import kind
from primus.data.documents.lines import UTF_16_MARKS, whole_lines
from primus.data.documents.places import place
from primus.data.documents.records import too_long
from primus.data.pipeline.shards import Part
from primus.errors import UsageError, did_you_mean


def cells(part: Part, stream: BinaryIO, key: str, fields: bool, longest: int) -> Iterator[Text | Bad]:
    """The text of each row; a row may have line ends inside of quotes.

    Args:
        part: The file.
        stream: Its content.
        key: Column that holds the text.
        fields: Give the other columns too.
        longest: Longest line, and longest cell, in bytes.

    Raises:
        UsageError: There is no such column.
    """
    table = _Table(part, stream, longest)
    header = table.header()
    if key not in header:
        raise UsageError(f"{part.file}: no column '{key}'", did_you_mean(key, header) or "it has no columns")
    if header.count(key) > 1:
        raise UsageError(f"{part.file}: {header.count(key)} columns are named '{key}'", "rename all but one")
    column = header.index(key)
    for number, row in table.rows():
        yield from table.take_bad()
        if isinstance(row, Bad):
            yield row
        elif row:
            yield _document(part, number, row, header, column, fields)
    yield from table.take_bad()


def columns(file: str, stream: BinaryIO) -> list[str]:
    """Names of the columns of a table."""
    return _Table(Part(file), stream, 1 << 20).header()


class _Table:
    """Rows of a table with the line at which each begins."""

    def __init__(self, part: Part, stream: BinaryIO, longest: int) -> None:
        csv.field_size_limit(longest)
        self._part = part
        self._lines = whole_lines(stream, longest)
        self._longest = longest
        self._number = self._begin = 0
        self._bad: list[Bad] = []
        dialect = csv.excel_tab if kind(part.file) == ".tsv" else csv.excel
        self._reader = csv.reader(self._decoded(), dialect, strict=True)

    def header(self) -> list[str]:
        """The cells of the first row that is not empty.

        Raises:
            UsageError: The file is UTF-16.
        """
        row = next((row for _, row in self.rows() if isinstance(row, list) and row), [])
        if row and row[0].encode(errors="surrogateescape").startswith(UTF_16_MARKS):
            raise UsageError(f"{self._part.file}: UTF-16, not UTF-8", "convert it by iconv -f UTF-16 -t UTF-8")
        return row

    def rows(self) -> Iterator[tuple[int, list[str] | Bad]]:
        """Each row that is left."""
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
                yield begin, Bad(place(self._part, begin), f"not a row of a table, {error}{lines}")

    def take_bad(self) -> list[Bad]:
        """Lines that no row has, because they are too long."""
        bad, self._bad = self._bad, []
        return bad

    def _decoded(self) -> Iterator[str]:
        for line in self._lines:
            self._number += 1
            if line is None:
                self._bad.append(Bad(place(self._part, self._number), too_long(self._longest)))
            else:
                self._begin = self._begin or self._number
                yield line.decode(errors="surrogateescape")


def _document(part: Part, number: int, row: list[str], header: list[str], column: int, fields: bool) -> Text | Bad:
    if len(row) != len(header):
        return Bad(place(part, number), f"{len(row)} columns where the header has {len(header)}")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:
        return Bad(place(part, number), f"not UTF-8 at character {error.start + 1} of the text")
    rest = {name: cell for name, cell in zip(header, row, strict=True) if name != header[column]} if fields else None
    return Text(row[column], True, True, rest, part, number)

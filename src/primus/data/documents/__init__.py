"""Documents from files: text, source trees, records and tables, with each bad one named by file and line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from primus.data.documents import columns, records, tables, texts
from primus.data.documents.document import Bad, Text
from primus.data.documents.files import find, open_content, size_of, whole_file_errors
from primus.data.documents.kinds import COLUMNS, RECORDS, TABLES, TEXT_DOCUMENTS, is_remote, kind
from primus.data.documents.lines import line_groups
from primus.data.documents.parts import plan
from primus.data.documents.text_columns import text_column
from primus.data.pipeline.shards import Part

__all__ = [
    "LONGEST_LINE",
    "TEXT_DOCUMENTS",
    "Bad",
    "Text",
    "find",
    "is_remote",
    "plan",
    "read",
    "size_of",
    "text_column",
]

LONGEST_LINE = 256 << 20
"""Bytes of a line, and so of a record, that is read; it needs several times as much memory."""


def read(
    part: Part | Path | str,
    key: str = "text",
    text_documents: str = "file",
    cut: bool = True,
    fields: bool = False,
    longest_line: int = LONGEST_LINE,
    lists: bool = False,
) -> Iterator[Text | Bad]:
    """Documents of one file or part of it, in its order and in constant memory.

    Args:
        part: A part that `plan` made, a path or a URL; the suffix says what it is.
        key: Field of a record, or column, that holds the text.
        text_documents: What is a document in a .txt file: the file, a paragraph (up to a blank line) or a line.
        cut: Cut long text files at line ends, so that one file can be shuffled and split.
        fields: Give the other fields of each record too.
        longest_line: A line of more bytes is a bad document.
        lists: Take a list of texts in a JSON record for a document in pieces, not for a bad one.

    Raises:
        UsageError: A table has no such column.
        PrimusError: The file as a whole cannot be read, as when it is truncated.
    """
    part = part if isinstance(part, Part) else Part(os.fspath(part))
    suffix = kind(part.file)
    if suffix in COLUMNS:
        with whole_file_errors(part.file):
            yield from columns.rows(part, key, fields)
        return
    with open_content(part.file) as stream:
        if suffix in TABLES:
            yield from tables.cells(part, stream, key, fields, longest_line)
        elif suffix in RECORDS:
            groups = line_groups(stream, part.first, part.last, longest_line)
            yield from records.records(part, groups, key, fields, longest_line, lists)
        elif suffix == ".txt" and text_documents == "line":
            yield from texts.by_line(part, line_groups(stream, part.first, part.last, longest_line), longest_line)
        elif suffix == ".txt" and text_documents == "paragraph":
            yield from texts.by_paragraph(part, stream, longest_line)
        else:
            yield from texts.by_file(part, stream, texts.piece_size(size_of(part.file)) if cut else None)

"""Read documents from text files, source trees, records and tables; bad documents are reported by file and line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from primus.data.readers import columns, records, tables, texts
from primus.data.readers.document import BadDocument, TextDocument
from primus.data.readers.files import explain_file_errors, find_files, open_content, read_size
from primus.data.readers.kinds import COLUMNS, RECORDS, TABLES, TEXT_DOCUMENTS, detect_kind, is_remote
from primus.data.readers.lines import read_line_groups
from primus.data.readers.parts import plan_shards
from primus.data.readers.shard import FilePart
from primus.data.readers.text_columns import choose_text_column

__all__ = [
    "LONGEST_LINE",
    "TEXT_DOCUMENTS",
    "BadDocument",
    "ReadOptions",
    "TextDocument",
    "choose_text_column",
    "find_files",
    "is_remote",
    "plan_shards",
    "read_documents",
    "read_size",
]

LONGEST_LINE = 256 << 20
"""Maximum size of a line, and so of a record, in bytes; reading it needs several times as much memory."""


class ReadOptions(NamedTuple):
    """How documents are read."""

    text_documents: str = "file"
    """Unit of a document in a .txt file: the file, a paragraph (up to a blank line) or a line."""
    cut: bool = True
    """Cut long text files at line ends, so that one file can be shuffled and split."""
    fields: bool = False
    """Return the other fields of each record too."""
    longest_line: int = LONGEST_LINE
    """Maximum size of a line in bytes; a longer line is a bad document."""
    lists: bool = False
    """Treat a list of texts in a JSON record as a document in pieces, not as a bad document."""


DEFAULT_OPTIONS = ReadOptions()


def read_documents(
    part: FilePart | Path | str, key: str = "text", options: ReadOptions = DEFAULT_OPTIONS
) -> Iterator[TextDocument | BadDocument]:
    """Read the documents of a file, or of a part of it, in file order and in constant memory.

    Args:
        part: A part from `plan_shards`, a path or a URL; the suffix determines the format.
        key: Field of a record, or column, that holds the text.
        options: How they are read.

    Raises:
        UsageError: A table does not have the column.
        PrimusError: The file as a whole cannot be read, for example because it is truncated.
    """
    part = part if isinstance(part, FilePart) else FilePart(os.fspath(part))
    text_documents, cut, fields, longest_line, lists = options
    suffix = detect_kind(part.file)
    if suffix in COLUMNS:
        with explain_file_errors(part.file):
            yield from columns.read_rows(part, key, fields)
        return
    with open_content(part.file) as stream:
        if suffix in TABLES:
            yield from tables.read_table(part, stream, key, fields, longest_line)
        elif suffix in RECORDS:
            groups = read_line_groups(stream, part.first, part.last, longest_line)
            yield from records.read_records(part, groups, key, fields, longest_line, lists)
        elif suffix == ".txt" and text_documents == "line":
            yield from texts.read_line_documents(
                part, read_line_groups(stream, part.first, part.last, longest_line), longest_line
            )
        elif suffix == ".txt" and text_documents == "paragraph":
            yield from texts.read_paragraph_documents(part, stream, longest_line)
        else:
            yield from texts.read_file_documents(
                part, stream, texts.choose_piece_size(read_size(part.file)) if cut else None
            )

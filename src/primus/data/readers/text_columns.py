"""Find the column of a table, or the field of records, that holds the text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

import msgspec

from primus.data.readers import columns, tables
from primus.data.readers.files import open_content
from primus.data.readers.kinds import COLUMNS, RECORDS, TABLES, detect_kind
from primus.data.readers.lines import number_lines, read_line_groups
from primus.errors import UsageError

USUAL = "text"
PLAUSIBLE = frozenset(
    "content contents body document raw_content article story passage page_content markdown code sentence".split()
)
NAME = re.compile(r"[\w.-]+( [\w.-]+){0,3}")
"""Plausible name of the only column of a table; anything else is probably text, in a table without a header."""
LONGEST_SHOWN, MOST_SHOWN = 40, 40
LOOKED_AT = 20
"""Number of records to read for the names of the fields."""
LONGEST_LOOKED_AT = 16 << 20


def choose_text_column(files: Iterable[str], option: str = "--json-keys") -> str:
    """Choose the column that holds the text of these files: ``text``, or else the only candidate.

    Args:
        files: Paths and URLs; the first file with columns determines the result.
        option: Option that names a column, for the message.

    Raises:
        UsageError: No column or more than one is a candidate; the message lists the columns.
        PrimusError: A file cannot be read.
    """
    file = next((file for file in files if detect_kind(file) in RECORDS | COLUMNS | TABLES), None)
    if file is None:
        return USUAL
    found = _read_columns(file)
    texts = [name for name, is_text in found.items() if is_text]
    if USUAL in texts or not found:
        return USUAL
    named = [name for name in texts if name.lower() in PLAUSIBLE | {USUAL}]
    if len(named) == 1 or (
        not named and len(texts) == 1 and (NAME.fullmatch(texts[0]) or detect_kind(file) not in TABLES)
    ):
        return (named or texts)[0]
    if detect_kind(file) in TABLES:
        valid = f"columns, which its first line must name: {_format_names(texts)}"
    else:
        valid = f"columns of text: {_format_names(texts)}; all: {_format_names(found)}"
    raise UsageError(f"{file}: several columns may hold the text", f"name one with {option}; {valid}")


def _format_names(names: Iterable[str]) -> str:
    """Format names in one line; long names and long lists are shortened."""
    shown = [name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..." for name in names]
    return ", ".join([*shown[:MOST_SHOWN], *(["..."] if len(shown) > MOST_SHOWN else [])]) or "none"


def _read_columns(file: str) -> dict[str, bool]:
    """Read the names of the columns of a file, and whether each holds text."""
    if detect_kind(file) in COLUMNS:
        return columns.read_schema(file)
    with open_content(file) as stream:
        if detect_kind(file) in TABLES:
            return dict.fromkeys(tables.read_column_names(file, stream), True)
        found: dict[str, bool] = {}
        for _, line in islice(number_lines(read_line_groups(stream, 0, None, LONGEST_LOOKED_AT)), LOOKED_AT):
            for name, value in _parse_record(line or b"").items():
                found[name] = found.get(name, False) or isinstance(value, str) or (name == USUAL and _is_texts(value))
        return found


def _is_texts(value: object) -> bool:
    """Whether a value is a list of texts, such as the sentences of a document."""
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _parse_record(line: bytes) -> dict[str, object]:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}

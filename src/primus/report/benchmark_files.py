"""Results of benchmarks in files, by suffix; and back from those that hold records."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from primus.benchmark import BenchmarkResult
from primus.errors import PrimusError, UsageError
from primus.report.benchmark_nccl import format_nccl_table
from primus.report.benchmark_table import (
    LAST_CASE_COLUMN,
    Record,
    build_columns,
    describe_result,
    format_result_table,
    format_value,
    list_records,
)
from primus.report.table import format_value_name
from primus.runs.files import to_json, write_bytes

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = ".jsonl"
MARKDOWN = (".md", ".markdown")
TABLES = (*MARKDOWN, *DELIMITERS, JSON_LINES)
"""Suffixes of files that hold a table."""
SUFFIXES = (*TABLES, *(f"{suffix}.gz" for suffix in TABLES), ".txt", ".json", ".html")
READABLE = tuple(suffix for suffix in SUFFIXES if not suffix.startswith((*MARKDOWN, ".txt", ".html")))
"""Suffixes of files that can be a baseline."""
NEEDED = (LAST_CASE_COLUMN, "value", "unit")


def find_suffix(path: str) -> str:
    """The suffix that decides the format of `path`.

    Raises:
        UsageError: It is not one of `SUFFIXES`.
    """
    found = next((suffix for suffix in SUFFIXES if path.lower().endswith(suffix)), None)
    if found is not None:
        return found
    raise UsageError(f"{path}: unknown format of results", f"use one of the suffixes {' '.join(SUFFIXES)}, or -")


def write_result(
    result: BenchmarkResult, path: str, format_page: Callable[[BenchmarkResult], str], *, appends: bool = False
) -> None:
    """Write `path` by rename.

    Args:
        format_page: Makes the page of an .html file.
        appends: Whether the rows of an existing file stay.

    Raises:
        PrimusError: The file cannot be written, or holds something else.
    """
    suffix = find_suffix(path).removesuffix(".gz")
    has_rows = appends and Path(path).exists()
    if suffix == ".html":
        text = format_page(result)
    elif suffix == ".txt":
        is_collective = all("op" in row.case for row in result.rows)
        text = format_nccl_table(result) if is_collective else format_result_table(result) + "\n"
    elif suffix == ".json":
        text = to_json(result) + "\n"
    elif suffix in MARKDOWN:
        text = (_read_text(path) + "\n" if has_rows else "") + format_markdown(result)
    else:
        text = _format_records([*(read_records(path) if has_rows else []), *list_records(result)], suffix)
    _write_text(path, text)


def write_table(rows: Sequence[Record], path: str) -> None:
    """Write rows of any columns to `path`, by rename.

    Raises:
        UsageError: The suffix is not that of a table.
        PrimusError: The file cannot be written.
    """
    suffix = find_table_suffix(path).removesuffix(".gz")
    if suffix not in MARKDOWN:
        _write_text(path, _format_records(rows, suffix))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = [[format_value(row.get(name)) for name in names] for row in rows]
    lines = [[format_value_name(name) for name in names], ["---"] * len(names), *body]
    _write_text(path, "".join(f"{_format_markdown_row(cells)}\n" for cells in lines))


def find_table_suffix(path: str) -> str:
    """The suffix of a file for `write_table`.

    Raises:
        UsageError: It is not one of a table.
    """
    suffix = find_suffix(path)
    if suffix.removesuffix(".gz") not in TABLES:
        raise UsageError(f"{path}: not a format of tables", f"use one of the suffixes {' '.join(TABLES)}")
    return suffix


def _write_text(path: str, text: str) -> None:
    data = text.encode()
    write_bytes(Path(path), gzip.compress(data, mtime=0) if path.lower().endswith(".gz") else data)


def _read_text(path: str) -> str:
    data = Path(path).read_bytes()
    return (gzip.decompress(data) if path.lower().endswith(".gz") else data).decode()


def format_markdown(result: BenchmarkResult) -> str:
    """The table in Markdown, with what was counted."""
    title = f"# benchmark {result.benchmark}\n\n"
    if not result.rows:
        return f"{title}no rows\n"
    header, body, right = build_columns(result.rows, result.world_size)
    rule = ["---:" if number in right else "---" for number in range(len(header))]
    lines = [_format_markdown_row(cells) for cells in (header, rule, *body)]
    notes = "".join(f"- {line}\n" for line in describe_result(result))
    return title + "\n".join(lines) + f"\n\n{notes}"


def _format_markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _format_records(records: Sequence[Record], suffix: str) -> str:
    if suffix == JSON_LINES:
        return "".join(json.dumps(record) + "\n" for record in records)
    text = io.StringIO()
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(text, names, delimiter=DELIMITERS[suffix], lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def read_records(path: str) -> list[Record]:
    """The rows of a result file.

    Raises:
        UsageError: The file has a format without records, or a line was damaged; the message names the line.
        PrimusError: The file cannot be read.
    """
    suffix = find_suffix(path)
    if suffix not in READABLE:
        raise UsageError(f"{path}: a {suffix} file cannot be a baseline", f"use one of {' '.join(READABLE)}")
    try:
        text = _read_text(path)
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise UsageError(f"{path}: damaged: {error}", "write it again by --output-file") from None
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
    suffix = suffix.removesuffix(".gz")
    if suffix == ".json":
        return _parse_result(path, text)
    if suffix == JSON_LINES:
        return [_parse_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    rows = csv.DictReader(io.StringIO(text), delimiter=DELIMITERS[suffix])
    return [_check_record(path, number, _convert_cells(row)) for number, row in enumerate(rows, 2)]


def _parse_result(path: str, text: str) -> list[Record]:
    try:
        records = list_records(msgspec.json.decode(text, type=BenchmarkResult))
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: damaged: {error}", "write it again by --output-file") from None
    return [_check_record(f"{path}: row", number, record) for number, record in enumerate(records, 1)]


def _parse_line(path: str, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}:{number}: damaged: {error}", "write it again by --output-file") from None
    return _check_record(path, number, record)


def _convert_cells(row: dict[str, str]) -> Record:
    """Cells of text as the values that were written; what identifies a row stays text."""
    converted: Record = dict(row)
    for name in ("value", "low", "high"):
        try:
            converted[name] = float(row[name]) if row.get(name) else None
        except (TypeError, ValueError):
            converted[name] = row[name]
    return converted


def _check_record(path: str, number: int, record: object) -> Record:
    hint = "write it again by --output-file"
    if not isinstance(record, dict):
        raise UsageError(f"{path}:{number}: not a row of results", hint)
    missing = [name for name in NEEDED if name not in record]
    if missing:
        raise UsageError(f"{path}:{number}: the column {missing[0]} is missing", hint)
    value = record["value"]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    if value is not None and not is_number:
        raise UsageError(f"{path}:{number}: value: {value!r} is not a positive number", hint)
    return record

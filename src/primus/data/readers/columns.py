"""Read documents from Apache Arrow tables: .parquet, .arrow and .feather files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from primus.data.readers.document import BadDocument, TextDocument
from primus.data.readers.files import explain_file_errors, open_seekable
from primus.data.readers.kinds import detect_kind
from primus.data.readers.locations import locate_document
from primus.data.readers.records import check_text
from primus.data.readers.shard import FilePart
from primus.errors import PrimusError, UsageError, did_you_mean

MOST_ROWS = 1024
BATCH_BYTES = 8 << 20
"""Limits of a batch: rows, and estimated bytes, so that long texts do not fill the memory."""
BUFFER = 1 << 20


def read_rows(part: FilePart, key: str, fields: bool) -> Iterator[TextDocument | BadDocument]:
    """Read the text of each row.

    Args:
        part: A file, or row groups of it.
        key: Column that holds the text.
        fields: Return the other columns too.

    Raises:
        UsageError: The column does not exist or does not hold text.
        PrimusError: The file is damaged.
    """
    _import_pyarrow(part.file)
    read, number = _read_parquet if detect_kind(part.file) == ".parquet" else _read_arrow, 0
    with _explain_arrow_errors(part.file):
        for batch in read(part, key, fields):
            yield from _convert_batch(part, batch, key, fields, number)
            number += batch.num_rows


def read_table(file: str) -> Iterator[dict[str, Any]]:
    """Read the rows of a parquet file with all columns.

    Raises:
        PrimusError: The file is damaged.
    """
    with _open_parquet(file) as table:
        for batch in table.iter_batches(MOST_ROWS):
            yield from batch.to_pylist()


def read_schema(file: str) -> dict[str, bool]:
    """Read the names of the columns of a file, and whether each holds text.

    Raises:
        PrimusError: The file is damaged.
    """
    pa = _import_pyarrow(file)
    if detect_kind(file) == ".parquet":
        with _open_parquet(file) as table:
            found = table.schema_arrow
    else:
        with _explain_arrow_errors(file), explain_file_errors(file), open_seekable(file) as stream:
            found = _open_arrow_reader(pa, stream).schema
    return {field.name: _is_text(pa, field.type) for field in found}


def count_rows(file: str) -> int:
    """Number of rows of a parquet file; only the metadata at the end of the file is read.

    Raises:
        PrimusError: The file is damaged.
    """
    with _open_parquet(file) as table:
        return int(table.metadata.num_rows)


def read_row_group_sizes(file: str) -> list[int]:
    """Compressed size in bytes of each row group of a parquet file.

    Raises:
        PrimusError: The file is damaged.
    """
    with _open_parquet(file) as table:
        groups = (table.metadata.row_group(index) for index in range(table.num_row_groups))
        return [
            sum(group.column(index).total_compressed_size for index in range(group.num_columns)) for group in groups
        ]


@contextmanager
def _open_parquet(file: str) -> Iterator[Any]:
    _import_pyarrow(file)
    from pyarrow import parquet

    with (
        _explain_arrow_errors(file), explain_file_errors(file), open_seekable(file) as stream,
        parquet.ParquetFile(stream) as table,
    ):  # fmt: skip
        yield table


@contextmanager
def _explain_arrow_errors(file: str) -> Iterator[None]:
    """Convert exceptions of pyarrow, which is installed, into errors that name the file."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise PrimusError(f"{file}: damaged, {error}", "copy or download it again") from None


def _import_pyarrow(file: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            f"{file}: reading {detect_kind(file)} needs the package pyarrow", "pip install pyarrow"
        ) from None
    return pyarrow


def _read_parquet(part: FilePart, key: str, fields: bool) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    with open_seekable(part.file) as stream, parquet.ParquetFile(stream, buffer_size=BUFFER, pre_buffer=False) as table:
        _check_column(part.file, table.schema_arrow, key, pa)
        groups = range(part.first, table.num_row_groups if part.last is None else part.last)
        for group in groups:
            size = _choose_batch_rows(table.metadata.row_group(group))
            yield from table.iter_batches(size, row_groups=[group], columns=None if fields else [key])


def _choose_batch_rows(group: Any) -> int:
    """Number of rows in a batch of about `BATCH_BYTES`."""
    row_bytes = group.total_byte_size / max(group.num_rows, 1)
    return max(1, min(MOST_ROWS, int(BATCH_BYTES / max(row_bytes, 1))))


def _read_arrow(part: FilePart, key: str, fields: bool) -> Iterator[Any]:
    import pyarrow as pa

    with open_seekable(part.file) as stream:
        reader = _open_arrow_reader(pa, stream)
        _check_column(part.file, reader.schema, key, pa)
        streaming = isinstance(reader, pa.RecordBatchReader)
        batches = reader if streaming else (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            chosen = batch if fields else batch.select([key])
            yield from (chosen.slice(start, MOST_ROWS) for start in range(0, chosen.num_rows, MOST_ROWS))


def _open_arrow_reader(pa: Any, stream: Any) -> Any:
    """Open the file or the stream format, which share these suffixes; only the former begins with a magic word."""
    magic = stream.read(6)
    stream.seek(0)
    return pa.ipc.open_file(stream) if magic == b"ARROW1" else pa.ipc.open_stream(stream)


def _check_column(file: str, found: Any, key: str, pa: Any) -> None:
    if key not in found.names:
        raise UsageError(f"{file}: no column '{key}'", did_you_mean(key, found.names) or "it has no columns")
    column = found.field(key).type
    if not _is_text(pa, column):
        raise UsageError(f"{file}: column '{key}' is {column}, not text", f"columns: {', '.join(found.names)}")


def _is_text(pa: Any, column: Any) -> bool:
    if pa.types.is_dictionary(column):
        return _is_text(pa, column.value_type)
    is_view = getattr(pa.types, "is_string_view", lambda column: False)
    return bool(pa.types.is_string(column) or pa.types.is_large_string(column) or is_view(column))


def _convert_batch(
    part: FilePart, batch: Any, key: str, fields: bool, before: int
) -> Iterator[TextDocument | BadDocument]:
    """Convert the rows of a batch; `before` is the number of rows before the batch in the part."""
    try:
        texts = batch.column(key).to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows > 1:
            for row in range(batch.num_rows):
                yield from _convert_batch(part, batch.slice(row, 1), key, fields, before + row)
        else:
            yield BadDocument(locate_document(part, before + 1), "not UTF-8")
        return
    rest = _convert_other_columns(part.file, batch, key) if fields else [None] * len(texts)
    for number, (text, others) in enumerate(zip(texts, rest, strict=True), before + 1):
        if isinstance(text, str):  # decoded from UTF-8, so it has no lone surrogate
            yield TextDocument(text, True, True, others, part, number)
        else:
            reason = check_text(text, "the text")
            yield BadDocument(locate_document(part, number), reason.reason if isinstance(reason, BadDocument) else "")


def _convert_other_columns(file: str, batch: Any, key: str) -> list[dict[str, object]]:
    """Columns of each row other than the text."""
    names = [name for name in batch.schema.names if name != key]
    values = [_convert_values(file, name, batch.column(name)) for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] or [{}] * batch.num_rows


def _convert_values(file: str, name: str, column: Any) -> list[Any]:
    """Values of a column; values that Python cannot represent, such as the year 30000, are converted to text.

    Raises:
        PrimusError: The values cannot be converted to text.
    """
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        import pyarrow as pa

        try:
            raw = column.cast(pa.string() if not _is_text(pa, column.type) else pa.large_binary()).to_pylist()
        except pa.ArrowException as error:
            raise PrimusError(f"{file}: column '{name}' cannot be read: {error}", "remove it from the file") from None
        values = [value.decode(errors="replace") if isinstance(value, bytes) else value for value in raw]
    return values

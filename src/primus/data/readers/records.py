"""Read documents from JSON lines; an invalid line is one bad document and does not affect other lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from primus.data.readers.document import BadDocument, TextDocument, decode_line
from primus.data.readers.locations import locate_document
from primus.data.readers.shard import FilePart
from primus.errors import did_you_mean


def read_records(
    part: FilePart, groups: Iterable[list[bytes | None]], key: str, fields: bool, longest: int, lists: bool = False
) -> Iterator[TextDocument | BadDocument]:
    """Read the text of each line; blank lines are skipped.

    Args:
        part: File part that contains the lines.
        groups: Groups of lines; None for a line that is too long.
        key: Field that holds the text.
        fields: Return the other fields too.
        longest: Maximum length of a line in bytes.
        lists: Treat a list of texts as a document in pieces.
    """
    decode = _build_decoder(key)
    before = 0
    for lines in groups:
        for number, line in enumerate(lines, before + 1):
            # The decoder of one field is faster, but does not validate skipped fields: it gets ASCII lines only.
            if decode and line and line.isascii() and not fields:
                try:
                    yield TextDocument(decode(line).text, True, True, None, part, number)
                    continue
                except (msgspec.MsgspecError, RecursionError):
                    pass
            if line is None:
                yield BadDocument(locate_document(part, number), describe_long_line(longest))
            elif line and not line.isspace():
                item = _decode_record(part, number, line.strip(), key, fields)
                yield from (
                    _read_text_list(item, part, number, line, key)
                    if lists and isinstance(item, BadDocument)
                    else (item,)
                )
        before += len(lines)


def describe_long_line(longest: int) -> str:
    """Reason text for a line that is too long."""
    size = f"{longest >> 20} MiB" if longest >= 1 << 20 else f"{longest} bytes"
    return f"a line of more than {size}"


def check_text(text: Any, what: str) -> str | BadDocument:
    """Check that a value is text without lone surrogates; otherwise return a BadDocument that names it `what`."""
    if not isinstance(text, str):
        return BadDocument("", f"{what} is {_name_json_type(text)}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return BadDocument("", f"{what} has half of a surrogate pair at character {error.start + 1}")
    return text


def _build_decoder(key: str) -> Callable[[bytes], Any] | None:
    """Build a decoder that extracts one field of a record; None if msgspec does not support the name of the field."""
    try:
        record = msgspec.defstruct("Record", [("text", str)], rename={"text": key}, gc=False)
    except ValueError:
        return None
    return msgspec.json.Decoder(record).decode


def _decode_record(part: FilePart, number: int, line: bytes, key: str, fields: bool) -> TextDocument | BadDocument:
    try:
        record = msgspec.json.decode(line)
        strict = True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        record = _parse_leniently(line)
        strict = False
    is_plain = strict and type(record) is dict and type(record.get(key)) is str
    text = record[key] if is_plain else _extract_text(record, key)
    if isinstance(text, BadDocument):
        return BadDocument(locate_document(part, number), text.reason)
    rest = {name: value for name, value in record.items() if name != key} if fields else None
    return TextDocument(text, True, True, rest, part, number)


def _read_text_list(
    bad: BadDocument, part: FilePart, number: int, line: bytes, key: str
) -> Iterator[TextDocument | BadDocument]:
    """Yield the texts of a record with a list of texts as a document in pieces; otherwise yield `bad`."""
    try:
        record = msgspec.json.decode(line.strip())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        record = None
    texts = record.get(key) if isinstance(record, dict) else None
    if not isinstance(texts, list) or not all(isinstance(check_text(text, key), str) for text in texts):
        yield bad
        return
    kept = [text for text in texts if text] or [""]
    for index, text in enumerate(kept):
        yield TextDocument(text, index == 0, index == len(kept) - 1, None, part, number)


def _extract_text(record: Any, key: str) -> str | BadDocument:
    if isinstance(record, BadDocument):
        return record
    if not isinstance(record, dict):
        return BadDocument("", f"a JSON {_name_json_type(record)}, not an object with a field '{key}' on each line")
    if key not in record:
        return BadDocument("", f"no field '{key}' ({did_you_mean(key, record) or 'no fields'})")
    return check_text(record[key], f"field '{key}'")


def _parse_leniently(line: bytes) -> Any:
    """Parse a line with Python's parser, which accepts NaN and lone surrogates; a BadDocument if that fails."""
    text = decode_line(line)
    if isinstance(text, BadDocument):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        if text in ("[", "{"):
            return BadDocument(
                "", "not JSON by itself but the beginning of it; each line must be a whole object (jq -c)"
            )
        return BadDocument("", f"not JSON ({str(error).replace(' line 1', '')})")
    except RecursionError:
        return BadDocument("", "JSON that is nested too deeply")


def _name_json_type(value: Any) -> str:
    if value is None:
        return "null"
    return {dict: "object", list: "array", str: "text", bool: "boolean"}.get(type(value), "number")

"""Documents of JSON lines; each bad line is one bad document and costs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from primus.data.readers.document import BadDocument, TextDocument, decode_line
from primus.data.readers.locations import locate_document
from primus.data.readers.shard import FilePart
from primus.errors import did_you_mean

RecordReader = Callable[[bytes], tuple[str, "dict[str, Any] | None"]]


def read_records(
    part: FilePart, groups: Iterable[list[bytes | None]], key: str, fields: bool, longest: int, lists: bool = False
) -> Iterator[TextDocument | BadDocument]:
    """The text of each line; lines of white space are none.

    Args:
        part: What the lines are of.
        groups: Lines, None for one that is too long.
        key: Field that holds the text.
        fields: Give the other fields too.
        longest: Longest line in bytes.
        lists: Take a list of texts for a document in pieces.
    """
    decode, decode_any = _build_decoder(key), _keep_other_fields if fields else _drop_other_fields
    before = 0
    for lines in groups:
        for number, line in enumerate(lines, before + 1):
            if decode and line and line.isascii() and not fields:  # the decoder does not check what it skips
                try:
                    yield TextDocument(decode(line).text, True, True, None, part, number)
                    continue
                except (msgspec.MsgspecError, RecursionError):
                    pass
            if line is None:
                yield BadDocument(locate_document(part, number), describe_long_line(longest))
            elif line and not line.isspace():
                item = _decode_record(part, number, line.strip(), key, decode_any)
                yield from (
                    _read_text_list(item, part, number, line, key)
                    if lists and isinstance(item, BadDocument)
                    else (item,)
                )
        before += len(lines)


def describe_long_line(longest: int) -> str:
    """Why a line was not read."""
    size = f"{longest >> 20} MiB" if longest >= 1 << 20 else f"{longest} bytes"
    return f"a line of more than {size}"


def check_text(text: Any, what: str) -> str | BadDocument:
    """A text that can be encoded, else why `what` is none."""
    if not isinstance(text, str):
        return BadDocument("", f"{what} is {_json_name(text)}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return BadDocument("", f"{what} has half of a surrogate pair at character {error.start + 1}")
    return text


def _build_decoder(key: str) -> Callable[[bytes], Any] | None:
    """Decoder of records of which only one field is wanted; None where the library cannot have such a name."""
    try:
        record = msgspec.defstruct("Record", [("text", str)], rename={"text": key}, gc=False)
    except ValueError:
        return None
    return msgspec.json.Decoder(record).decode


def _keep_other_fields(record: dict[str, Any], key: str) -> dict[str, Any] | None:
    return {name: value for name, value in record.items() if name != key}


def _drop_other_fields(record: dict[str, Any], key: str) -> dict[str, Any] | None:
    return None


def _decode_record(
    part: FilePart, number: int, line: bytes, key: str, rest: Callable[[dict[str, Any], str], dict[str, Any] | None]
) -> TextDocument | BadDocument:
    try:
        record = msgspec.json.decode(line)
        strict = True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        record = _parse_leniently(line)
        strict = False
    if strict and type(record) is dict and type(record.get(key)) is str:
        return TextDocument(record[key], True, True, rest(record, key), part, number)
    text = _extract_text(record, key)
    if isinstance(text, BadDocument):
        return BadDocument(locate_document(part, number), text.reason)
    return TextDocument(text, True, True, rest(record, key), part, number)


def _read_text_list(
    bad: BadDocument, part: FilePart, number: int, line: bytes, key: str
) -> Iterator[TextDocument | BadDocument]:
    """The texts of a record that is bad for having a list of them, as a document in pieces; else what is bad."""
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
        return BadDocument("", f"a JSON {_json_name(record)}, not an object with a field '{key}' on each line")
    if key not in record:
        return BadDocument("", f"no field '{key}' ({did_you_mean(key, record) or 'no fields'})")
    return check_text(record[key], f"field '{key}'")


def _parse_leniently(line: bytes) -> Any:
    """What Python's own parser makes of a line, which takes NaN and lone surrogates; Bad if nothing."""
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


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    return {dict: "object", list: "array", str: "text", bool: "boolean"}.get(type(value), "number")

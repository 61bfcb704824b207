"""Documents of JSON lines; each bad line is one bad document and costs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from primus.data.documents.document import Bad, Text, decoded
from primus.data.documents.places import place
from primus.data.pipeline.shards import Part
from primus.errors import did_you_mean

RecordReader = Callable[[bytes], tuple[str, "dict[str, Any] | None"]]


def records(
    part: Part, groups: Iterable[list[bytes | None]], key: str, fields: bool, longest: int, lists: bool = False
) -> Iterator[Text | Bad]:
    """The text of each line; lines of white space are none.

    Args:
        part: What the lines are of.
        groups: Lines, None for one that is too long.
        key: Field that holds the text.
        fields: Give the other fields too.
        longest: Longest line in bytes.
        lists: Take a list of texts for a document in pieces.
    """
    decode, decode_any = _decoder(key), _with_fields if fields else _without_fields
    before = 0
    for lines in groups:
        for number, line in enumerate(lines, before + 1):
            if decode and line and line.isascii() and not fields:  # the decoder does not check what it skips
                try:
                    yield Text(decode(line).text, True, True, None, part, number)
                    continue
                except (msgspec.MsgspecError, RecursionError):
                    pass
            if line is None:
                yield Bad(place(part, number), too_long(longest))
            elif line and not line.isspace():
                item = _record(part, number, line.strip(), key, decode_any)
                yield from _pieces(item, part, number, line, key) if lists and isinstance(item, Bad) else (item,)
        before += len(lines)


def too_long(longest: int) -> str:
    """Why a line was not read."""
    size = f"{longest >> 20} MiB" if longest >= 1 << 20 else f"{longest} bytes"
    return f"a line of more than {size}"


def checked(text: Any, what: str) -> str | Bad:
    """A text that can be encoded, else why `what` is none."""
    if not isinstance(text, str):
        return Bad("", f"{what} is {_json_name(text)}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad("", f"{what} has half of a surrogate pair at character {error.start + 1}")
    return text


def _decoder(key: str) -> Callable[[bytes], Any] | None:
    """Decoder of records of which only one field is wanted; None where the library cannot have such a name."""
    try:
        record = msgspec.defstruct("Record", [("text", str)], rename={"text": key}, gc=False)
    except ValueError:
        return None
    return msgspec.json.Decoder(record).decode


def _with_fields(record: dict[str, Any], key: str) -> dict[str, Any] | None:
    return {name: value for name, value in record.items() if name != key}


def _without_fields(record: dict[str, Any], key: str) -> dict[str, Any] | None:
    return None


def _record(
    part: Part, number: int, line: bytes, key: str, rest: Callable[[dict[str, Any], str], dict[str, Any] | None]
) -> Text | Bad:
    try:
        record = msgspec.json.decode(line)
        strict = True
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        record = _lenient(line)
        strict = False
    if strict and type(record) is dict and type(record.get(key)) is str:
        return Text(record[key], True, True, rest(record, key), part, number)
    text = _text_of(record, key)
    if isinstance(text, Bad):
        return Bad(place(part, number), text.reason)
    return Text(text, True, True, rest(record, key), part, number)


def _pieces(bad: Bad, part: Part, number: int, line: bytes, key: str) -> Iterator[Text | Bad]:
    """The texts of a record that is bad for having a list of them, as a document in pieces; else what is bad."""
    try:
        record = msgspec.json.decode(line.strip())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        record = None
    texts = record.get(key) if isinstance(record, dict) else None
    if not isinstance(texts, list) or not all(isinstance(checked(text, key), str) for text in texts):
        yield bad
        return
    kept = [text for text in texts if text] or [""]
    for index, text in enumerate(kept):
        yield Text(text, index == 0, index == len(kept) - 1, None, part, number)


def _text_of(record: Any, key: str) -> str | Bad:
    if isinstance(record, Bad):
        return record
    if not isinstance(record, dict):
        return Bad("", f"a JSON {_json_name(record)}, not an object with a field '{key}' on each line")
    if key not in record:
        return Bad("", f"no field '{key}' ({did_you_mean(key, record) or 'no fields'})")
    return checked(record[key], f"field '{key}'")


def _lenient(line: bytes) -> Any:
    """What Python's own parser makes of a line, which takes NaN and lone surrogates; Bad if nothing."""
    text = decoded(line)
    if isinstance(text, Bad):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        if text in ("[", "{"):
            return Bad("", "not JSON by itself but the beginning of it; each line must be a whole object (jq -c)")
        return Bad("", f"not JSON ({str(error).replace(' line 1', '')})")
    except RecursionError:
        return Bad("", "JSON that is nested too deeply")


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    return {dict: "object", list: "array", str: "text", bool: "boolean"}.get(type(value), "number")

"""YAML data files, such as device profiles: checked against a Struct, with file, line and nearest name of each mistake.

Scalars are read as the text that was written, and converted by the type of their field: the value `1` of a variable
stays `1`, and `.97` stays `.97`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
import yaml
from msgspec import Struct

from primus.config.source import Leaf, Tree, read_yaml
from primus.config.text_file import format_path
from primus.errors import UsageError, did_you_mean

_Record = TypeVar("_Record", bound=Struct)
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = "tag:yaml.org,2002:null"
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


class DataFile(NamedTuple):
    """A data file as written."""

    path: Path
    values: dict[str, object]
    """Mappings, lists, text and None."""


class _TextLoader(_Base):  # type: ignore[misc]
    """Leaves every scalar but null as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - how PyYAML spells it
        first: [(tag, pattern) for tag, pattern in resolvers if tag == _NULL]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; PyYAML itself drops all but the last of repeated keys."""
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise yaml.YAMLError("a key is given twice")
        return mapping


def read_data_file(path: Path) -> DataFile:
    """Read a data file, whose top level is a mapping.

    Raises:
        UsageError: It cannot be read, is not YAML, or repeats a key.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_TextLoader)  # noqa: S506 - derived from SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError, TypeError):
        values = None
    if not isinstance(values, dict):
        read_yaml(path, None)  # slower, and reports the error with its line
        raise UsageError(f"{format_path(path)}: cannot be read as a data file", "write plain keys and values")
    return DataFile(path, values)


def convert_data(values: Mapping[str, object], kind: type[_Record], files: Sequence[DataFile]) -> _Record:
    """Convert `values` to a record.

    Args:
        values: The merged values of `files`.
        kind: Its type, which forbids unknown fields.
        files: The files, that of the record itself first; errors name their lines.

    Raises:
        UsageError: A key is unknown, a value does not fit its field, or a field is missing.
    """
    try:
        return msgspec.convert({name: _parse_units(name, value) for name, value in values.items()}, kind, strict=False)
    except msgspec.ValidationError as error:
        problems: list[str] = []
        for file in files:
            tree = read_yaml(file.path, None)
            tree.pop("extends", None)
            problems += _find_problems(tree, kind)
        problem = f"{format_path(files[0].path)}: {_format_error(error)}"
        raise UsageError("\n".join(problems) or problem) from None


def _parse_units(name: str, value: object) -> object:
    """Numbers in the notations of data sheets: hexadecimal ids, and sizes with a unit."""
    if name.endswith("_ids") and isinstance(value, list):
        return [_parse_integer(item) for item in value]
    if name.endswith("_bytes") and isinstance(value, str) and not value.isdecimal():
        number, _, unit = value.partition(" ")
        if not number.isdecimal() or unit not in _SIZES:
            raise msgspec.ValidationError(f"expected a size such as '{1 << 10} MiB', got '{value}'")
        return int(number) * _SIZES[unit]
    return value


def _parse_integer(text: Any) -> int:
    try:
        return int(text, 0)
    except (ValueError, TypeError):
        raise msgspec.ValidationError(f"expected a number such as 0x74A1, got '{text}'") from None


def _find_problems(tree: Tree, kind: type[Struct]) -> Iterator[str]:
    """List the problems of the keys and values of a file, or of a mapping in it."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, item in tree.items():
        if key in fields:
            yield from _find_value_problems(key, item, fields[key])
        else:
            yield f"{_find_place(item)}: unknown key '{key}'; {did_you_mean(key, fields)}"


def _find_value_problems(key: str, item: Leaf | Tree, kind: Any) -> Iterator[str]:
    inner = get_args(kind)[1] if get_origin(kind) is dict else None
    if isinstance(item, dict) and isinstance(inner, type) and issubclass(inner, Struct):
        for name, value in item.items():
            if isinstance(value, dict):
                yield from _find_problems(value, inner)
            elif value.value is not None:
                yield f"{value.origin}: {key}.{name}: expected a mapping with {', '.join(inner.__struct_fields__)}"
        return
    value = _strip_to_text(item)
    try:
        if value is not None:  # null removes what the extended file sets
            msgspec.convert(_parse_units(key, value), kind, strict=False)
    except msgspec.ValidationError as error:
        yield f"{_find_place(item)}: {key}: {_format_error(error)}"


def _strip_to_text(item: Leaf | Tree) -> Any:
    """The value as `read_data_file` reads it."""
    if isinstance(item, dict):
        return {key: _strip_to_text(value) for key, value in item.items()}
    if isinstance(item.value, list):
        return [str(value) for value in item.value]
    return None if item.value is None else item.text


def _find_place(item: Leaf | Tree) -> str:
    """File and line of a value; of a mapping, those of the first value in it."""
    while isinstance(item, dict):
        item = next(iter(item.values()), Leaf(None, "an empty mapping"))
    return item.origin


def _format_error(error: msgspec.ValidationError) -> str:
    return str(error).replace("`", "'").replace("Object missing required", "missing").split(" - at")[0]

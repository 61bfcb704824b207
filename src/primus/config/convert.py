"""Convert values to the types of their keys, and keep the origin of each."""

from __future__ import annotations

import math
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from primus.config.schema import GROUPS
from primus.config.schema_keys import ZERO_IS_NONE, needs_value
from primus.config.source import Leaf, Tree, parse_scalar, strip_origins
from primus.errors import UsageError, find_nearest
from primus.redaction import MASK, is_secret_name, redact

DEFAULT = "default"
"""Origin of a value that is not set."""

DEVICE_WORDS = dict.fromkeys(("gpu", "rocm", "hip", "nvidia", "amd"), "cuda")
"""Other words for the devices that PyTorch calls cuda."""

LONGEST_SHOWN = 80
"""Number of characters of an invalid value that a message shows."""


def find_origin(item: Leaf | Tree) -> str:
    """Origin of a value; of a mapping, that of the first value in it."""
    while not isinstance(item, Leaf):
        if not item:
            return "experiment"
        item = next(iter(item.values()))
    return item.origin


def make_group(group: str, settings: Tree) -> tuple[Any, dict[str, str]]:
    """The group's Struct from the flat settings, and the origin of each field.

    Raises:
        UsageError: Values are invalid or missing; all of them are listed.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for field in msgspec.structs.fields(GROUPS[group]):
        item = settings.get(field.name)
        if item is None:
            origins[field.name] = DEFAULT
            if field.required:
                problems.append(f"the {group} preset lacks '{field.name}'")
            continue
        origins[field.name] = find_origin(item)
        if _leaves_default(item, field):
            continue
        try:
            values[field.name] = convert_value(_replace_zero(item, field.name), field.type)
        except msgspec.ValidationError as error:
            problems.append(f"{find_origin(item)}: {field.name}: {find_conversion_problem(item, field.type, error)}")
    if problems:
        raise UsageError("\n".join(problems))
    return GROUPS[group](**values), origins


def _leaves_default(item: Leaf | Tree, field: msgspec.structs.FieldInfo) -> bool:
    """Whether null is set for a key that cannot be null but has an equivalent default: 0, false, no scaling."""
    is_null = isinstance(item, Leaf) and item.value is None
    takes_null = type(None) in list_union_members(field.type)
    return is_null and not takes_null and not field.required and not needs_value(field)


def _replace_zero(item: Leaf | Tree, name: str) -> Leaf | Tree:
    """`item`, or null for the 0 of a key where both mean the same."""
    if name in ZERO_IS_NONE and isinstance(item, Leaf) and type(item.value) in (int, float) and item.value == 0:
        return Leaf(None, item.origin)
    return item


def convert_value(item: Leaf | Tree, kind: Any) -> Any:
    """`item` as `kind`.

    An integral float is an integer, 0 and 1 are booleans, and a typed value or that of a variable may be a
    string or a number.

    Raises:
        ValidationError: The conversion is not possible.
    """
    if not isinstance(item, Leaf):
        return msgspec.convert(strip_origins(item), kind)
    value = item.value
    _check_scalars(value)
    candidates = [value]
    candidates += [int(value)] if isinstance(value, float) and value.is_integer() else []
    if item.typed:
        # A quoted "${VARIABLE}" may hold a number.
        candidates += [item.text, parse_scalar(value) if isinstance(value, str) else value]
    candidates += [bool(each) for each in candidates if type(each) is int and each in (0, 1)]
    problem: msgspec.ValidationError | None = None
    for candidate in candidates:
        try:
            return msgspec.convert(candidate, kind)
        except msgspec.ValidationError as error:
            problem = problem or error
    assert problem
    raise problem


def _check_scalars(value: Any) -> None:
    """Reject values that no file, tensor or operating system accepts."""
    if isinstance(value, list):
        for each in value:
            _check_scalars(each)
    if isinstance(value, float) and not math.isfinite(value):
        raise msgspec.ValidationError("expected a finite number")
    if isinstance(value, str) and "\0" in value:
        raise msgspec.ValidationError("text cannot hold a NUL character")


def find_conversion_problem(item: Leaf | Tree, kind: Any, error: msgspec.ValidationError) -> str:
    """Why `item` is not a `kind`, in terms of YAML."""
    reason = str(error).replace("`", "").replace("Expected", "expected").split(" - at")[0]
    if not isinstance(item, Leaf):
        return f"{reason} (a mapping)"
    if isinstance(item.value, bool) and item.origin.startswith("--") and not item.typed:
        return f"it needs a value: {item.origin} VALUE" if item.value else "it is not an on-off option"
    if reason.startswith("Invalid enum value"):
        choices = [str(choice) for option in list_union_members(kind) for choice in get_args(option)]
        close = DEVICE_WORDS.get(str(item.value).lower()) if "cuda" in choices else None
        close = close or find_nearest(str(item.value), choices)
        hint = f"did you mean '{close}'?" if close else f"valid: {', '.join(choices)}"
        return f"{_format_item(item)} is not possible; {hint}"
    if item.value is None and type(None) not in list_union_members(kind):
        return f"{reason}; remove it to use the default"
    if _is_large_integer(item.value) and int in list_union_members(kind):
        return f"expected int <= {2**63 - 1} ({_format_item(item, quoted=False)})"
    return f"{reason} ({_format_item(item)})"


def _is_large_integer(value: Any) -> bool:
    """Whether `value` is an integer that the reader kept as text, because it exceeds 64 bits."""
    return isinstance(value, str) and _INTEGER.fullmatch(value) is not None


_INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F]+|\d[\d_]*)")


def _format_item(item: Leaf, *, quoted: bool = True) -> str:
    if any(is_secret_name(name) for name in item.origin.split(", ") if name.startswith("$")):
        return MASK
    text = redact(repr(item.value) if quoted else str(item.text or item.value))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def list_union_members(kind: Any) -> tuple[Any, ...]:
    """Members of a union, each without its bounds; the type itself where it is not one."""
    if hasattr(kind, "__metadata__"):
        return list_union_members(kind.__origin__)
    if get_origin(kind) in (Union, UnionType):
        return tuple(inner for member in get_args(kind) for inner in list_union_members(member))
    return (kind,)

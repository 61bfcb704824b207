"""Records that a user writes in YAML: their values keep the types that YAML gives them, and mistakes name the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from primus.config.convert import find_conversion_problem, find_origin
from primus.config.source import Leaf, Tree
from primus.errors import UsageError, did_you_mean

_Record = TypeVar("_Record", bound=Struct)


def convert_tree(tree: Tree, kind: type[_Record], hint: str = "") -> _Record:
    """The record that the keys of `tree` describe; `hint` says where its form is described.

    Raises:
        UsageError: A key is unknown, or a value has the wrong type; names the line and the nearest key.
    """
    hints, values = get_type_hints(kind, include_extras=True), {}
    for key, item in tree.items():
        if key not in hints:
            longer = [name for name in hints if name.startswith(key)]  # suggests gpus, not cpu, for gpu
            raise UsageError(f"{find_origin(item)}: unknown key '{key}'", did_you_mean(key, longer or hints))
        values[key] = _convert_item(item, hints[key], key, hint)
    return kind(**values)


def _convert_item(item: Leaf | Tree, kind: Any, key: str, hint: str) -> Any:
    convert = _find_mapping_reader(kind, key, hint)
    if convert is not None and not isinstance(item, Leaf):
        return convert(item)
    if convert is not None or not isinstance(item, Leaf):
        wanted = "a mapping" if convert is not None else "a value"
        raise UsageError(f"{find_origin(item)}: {key} is not {wanted}", hint)
    # Versions as text: YAML reads 28.39 as a number.
    if kind == tuple[str, ...]:
        return tuple(map(str, item.value)) if isinstance(item.value, list) else (item.text or str(item.value),)
    is_text = kind in (str, str | None) and item.value is not None
    try:
        return msgspec.convert(item.text or str(item.value) if is_text else item.value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{item.origin}: {key}: {find_conversion_problem(item, kind, error)}") from None


def _find_mapping_reader(kind: Any, key: str, hint: str) -> Callable[[Tree], Any] | None:
    """The function that converts a mapping into a value of the type `kind`; None if the type does not use mappings."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return lambda tree: convert_tree(tree, kind, hint)
    if get_origin(kind) is dict:
        inner = get_args(kind)[1]
        return lambda tree: {name: _convert_item(item, inner, f"{key}.{name}", hint) for name, item in tree.items()}
    return None

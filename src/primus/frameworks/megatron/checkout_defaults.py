"""Defaults of the `arguments.py` in a script's own checkout, which a fork or another release may have changed."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from primus.config.imports.foreign_config import list_kinds
from primus.config.schema import OWNERS
from primus.config.translation.known_keys import KnownKey

FILES = ("megatron/training/arguments.py", "megatron/arguments.py")
"""Where the parser is, since 2024 and before."""
LARGEST_FILE = 1 << 20


class CheckoutDefaults(Struct, frozen=True):
    """What a checkout's parser sets where an argument is absent; sorted by what is known of each argument."""

    file: str
    keys: dict[str, Any]
    """By key of the schema."""
    arguments: dict[str, Any]
    """Other than those of our release, of arguments that change numbers, by dest."""
    others: dict[str, Any]
    """Other than those of our release, of arguments that do not."""
    unknown: dict[str, Any]
    """Of arguments that our release does not have, and that do something by default."""


def read_checkout_defaults(
    folders: Sequence[Path], given: Collection[str], renamed: Mapping[str, str], known: Mapping[str, KnownKey]
) -> CheckoutDefaults | None:
    """The defaults that hold for a script; None without a parser in its checkout.

    The file is parsed, not run: a default that is computed is not seen.

    Args:
        folders: The folder of the script, and those above it.
        given: Arguments of the script, with underscores.
        renamed: Key of the schema by the name of an argument.
        known: Arguments of our release by dest.
    """
    file = next((path for folder in folders for path in (folder / name for name in FILES) if path.is_file()), None)
    parser = _parse_file(file) if file else None
    if file is None or parser is None:
        return None
    found = CheckoutDefaults(str(file), {}, {}, {}, {})
    for call in (node for node in ast.walk(parser) if isinstance(node, ast.Call)):
        dest, names, default = _read_argument(call)
        key = renamed.get(dest, dest)
        if not dest or default in (None, "") or not names.isdisjoint(given) or dest in given:
            continue
        choices = known[dest].choices if dest in known else []
        if choices and isinstance(default, str) and default.lower() not in map(str.lower, map(str, choices)):
            found.unknown[dest] = default
        elif key in OWNERS:
            if not (kinds := list_kinds(key)) or type(default) in kinds or (float in kinds and type(default) is int):
                found.keys[key] = default
        elif dest not in known:
            if default:
                found.unknown[dest] = default
        elif (default or known[dest].default) and default != known[dest].default:
            (found.arguments if known[dest].effect == "numbers" else found.others)[dest] = default
    return found


def _parse_file(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_bytes()) if file.stat().st_size <= LARGEST_FILE else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _read_argument(call: ast.Call) -> tuple[str, set[str], Any]:
    """Dest, names with underscores and default of a call of `add_argument`; an empty dest for any other call."""
    flags = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")]
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument" and names):
        return "", set(), None
    stated = {keyword.arg: _read_constant(keyword.value) for keyword in call.keywords}
    default = stated.get("default", {"store_true": False, "store_false": True}.get(str(stated.get("action"))))
    return str(stated.get("dest") or names[0]), set(names), default


def _read_constant(node: ast.expr) -> Any:
    """The value of an expression without names; None for any other."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None

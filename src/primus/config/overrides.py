"""Parse command-line overrides of the experiment: `--lr 1e-4`, `--lr=1e-4`, `lr=1e-4`, `--flag`, dotted names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from primus.config.experiment_file import MODULE_KEYS, TOP_KEYS
from primus.config.schema import OWNERS
from primus.config.schema_keys import list_switch_keys, list_text_keys
from primus.config.source import Leaf, Tree, parse_scalar
from primus.errors import UsageError

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)=(?P<value>.*)", re.DOTALL)
_FILE_PREFIX = re.compile(r"modules\.(pre_trainer|post_trainer|sft_trainer|rl_trainer)\.(overrides\.)?")

NESTED = ("env", "backend_args")
"""Keys with arbitrary subkeys: `env.NAME=value`."""


def parse_overrides(words: Sequence[str], stage: str | None = None) -> Tree:
    """Overrides by name; values are read as YAML scalars, a flag without a value is true.

    Args:
        words: The command line.
        stage: The module that is changed; a name that begins ``modules.<another>.`` is refused.

    Raises:
        UsageError: A word is neither an option nor an assignment, or changes another module.
    """
    tree: Tree = {}
    rest = list(words)
    for word in rest:
        other = _FILE_PREFIX.match(word.removeprefix("--"))
        if other and stage not in (None, other[1]):
            raise UsageError(f"{word.split('=')[0]}: the module is '{stage}', not '{other[1]}'")
    while rest:
        word = rest.pop(0)
        is_option = word.startswith("--") and len(word) > 2
        match = _ASSIGNMENT.fullmatch(word.removeprefix("--") if is_option else word)
        if match:
            _put_value(tree, match["name"], match["value"])
        elif not is_option:
            name = word.lstrip("-").partition("=")[0]
            example = f"--{name} VALUE" if word.startswith("-") and is_known(name) else "--name value or name=value"
            raise UsageError(f"unexpected word {word!r}", f"overrides are written {example}")
        elif rest and _is_value(word, rest[0]):
            _put_value(tree, word[2:], rest.pop(0))
        else:
            _put_flag(tree, word[2:])
    return tree


def is_known(name: str) -> bool:
    """Whether an override can set `name`."""
    path = _normalize_name(name)
    is_nested = len(path) > 1 and path[0] in NESTED
    return is_nested or path[-1] in OWNERS or (len(path) == 1 and path[0] in (*TOP_KEYS, *MODULE_KEYS))


def _is_value(option: str, word: str) -> bool:
    """Whether `word` is the value of `option` rather than the next override."""
    if word.startswith("--"):
        return False
    match = _ASSIGNMENT.fullmatch(word)
    is_switch = _normalize_name(option[2:])[-1] in list_switch_keys() - list_text_keys()
    return not match or not (is_switch or is_known(match["name"]))


def _put_flag(tree: Tree, name: str) -> None:
    negated = _normalize_name(name)[-1].removeprefix("no_")
    if _normalize_name(name)[-1] not in OWNERS and negated in OWNERS:
        _put_leaf(tree, negated, Leaf(False, f"--{name}", "false"))
        return
    _put_leaf(tree, name, Leaf(True, f"--{name}", "true"))


def _put_value(tree: Tree, name: str, text: str) -> None:
    _put_leaf(tree, name, Leaf(parse_scalar(text), f"--{name}", text, typed=True))


def _put_leaf(tree: Tree, name: str, leaf: Leaf) -> None:
    path = _normalize_name(name)
    for part in path[:-1]:
        below = tree.setdefault(part, {})
        if isinstance(below, Leaf):
            raise UsageError(f"--{name}: '{part}' already has a value")
        tree = below
    tree[path[-1]] = leaf


def _normalize_name(name: str) -> list[str]:
    """Parts of a dotted name; only the last part of `env.` keeps its spelling."""
    parts = _FILE_PREFIX.sub("", name).split(".")
    if parts[0] == "env":
        return parts
    return [part.replace("-", "_") for part in parts]

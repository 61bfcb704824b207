"""Errors for unknown keys, with hints: the equivalent key, or the engine that has the setting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from primus.config.convert import find_origin
from primus.config.experiment_file import TOP_KEYS
from primus.config.foreign_keys import list_engine_prefixes, list_synonyms, read_foreign_keys
from primus.config.schema import GROUPS, OWNERS
from primus.config.source import Leaf, Tree
from primus.errors import UsageError, did_you_mean, find_nearest

MOST_SHOWN = 10
"""Number of unknown keys that a message lists; further ones are counted."""
LONGEST_KEY = 80
"""Characters of a key that a message shows."""


def build_unknown_keys_error(unknown: Mapping[str, Leaf | Tree], valid: Iterable[str]) -> UsageError:
    """Build the error for keys that neither the schema nor the framework has.

    Args:
        unknown: The keys, in the order in which they were written.
        valid: Keys that the framework accepts.
    """
    names = (*valid, *TOP_KEYS)
    lines, engines = [], set[str]()
    for key, item in list(unknown.items())[:MOST_SHOWN]:
        engine = find_engine(key, names)
        engines |= {engine} if engine else set()
        hint = _make_hint(key, item, names)
        lines.append(f"{find_origin(item)}: unknown key '{_shorten_key(key)}'" + (f"; {hint}" if hint else ""))
    if len(unknown) > MOST_SHOWN:
        lines.append(f"... and {len(unknown) - MOST_SHOWN:,} more unknown keys ({len(unknown):,} in all)")
    return UsageError("\n".join(lines), _format_advice(engines))


def build_unknown_section_error(
    key: str, item: Leaf | Tree, valid: Collection[str], what: str, within: str, otherwise: str = ""
) -> UsageError:
    """Build the error for a key of the experiment file or of a module, outside its settings.

    Args:
        key: The key.
        item: Its value.
        valid: Keys that belong there.
        what: Name of the place.
        within: Key that holds the settings.
        otherwise: Hint where no valid key is similar, instead of all valid keys.
    """
    hint = f"put it under '{within}:'" if key in OWNERS else did_you_mean(key, list(valid))
    if otherwise and not find_nearest(key, list(valid)):
        hint = otherwise
    if key in ("lora", "peft"):
        hint = (
            "settings of adapters at this level have no effect in Primus, which reads those of a module;"
            " fine-tune with them by framework: megatron_bridge or native, peft: lora under 'overrides:'"
        )
    return UsageError(f"{find_origin(item)}: unknown key '{key}' in the {what}", hint)


def find_synonym_hint(key: str) -> str:
    """Hint with the equivalent of another framework's `key`: ``use lr``; empty without an equivalent."""
    parts = [part.replace("-", "_").lower() for part in key.split(".")]
    synonyms = list_synonyms()
    use = synonyms.get(".".join(parts)) or synonyms.get(parts[-1])
    return f"use {use}" if use else ""


def find_engine(key: str, valid: Iterable[str] = ()) -> str:
    """The engine that has a setting `key`; empty if none is known, or if `key` is close to a `valid` one."""
    for engine, names in read_foreign_keys().engine_keys.items():
        if key in names.split():
            return engine
    prefixes = list_engine_prefixes()
    prefix = next((prefix for prefix in prefixes if key.startswith(prefix)), None)
    if prefix is None or find_nearest(key, [name for name in valid if name.startswith(prefix)]):
        return ""
    return prefixes[prefix]


def _make_hint(key: str, item: Leaf | Tree, valid: tuple[str, ...]) -> str:
    word = key.lower().partition("_")[0]
    # Not for a misspelt key of a framework that has the feature.
    features = read_foreign_keys().unsupported_features
    if word in features and word not in valid:
        return features[word]
    if not isinstance(item, Leaf):
        return _group_hint(key, item)
    hint = find_synonym_hint(key)
    if hint:
        return hint
    engine = find_engine(key, valid)
    if engine:
        return f"it is a setting of {engine}"
    close = find_nearest(key, valid)
    return f"did you mean '{close}'?" if close else ""


def _group_hint(key: str, group: Tree) -> str:
    """Hint for a mapping instead of a value: groups are written in torchtitan's files, and not here."""
    inner = next(_walk_paths(group), None)
    if inner:
        if inner[-1] in OWNERS:
            return f"keys stand directly under 'overrides:', not in groups: {inner[-1]}"
        hint = find_synonym_hint(".".join((key, *inner)))
        if hint:
            return f"{'.'.join((key, *inner))}: {hint}"
    if key.isupper():
        return "variables stand under 'env:' of the experiment"
    if key in GROUPS:
        return "keys stand directly under 'overrides:', not in groups"
    engine = find_engine(key)
    return f"it is a setting of {engine}" if engine else ""


def _walk_paths(tree: Tree) -> Iterator[tuple[str, ...]]:
    for key, item in tree.items():
        if isinstance(item, Leaf):
            yield (key,)
        else:
            yield from ((key, *inner) for inner in _walk_paths(item))


def _shorten_key(key: str) -> str:
    return key if len(key) <= LONGEST_KEY else f"{key[:LONGEST_KEY]}..."


def _format_advice(engines: set[str]) -> str:
    if engines:
        return f"remove what only {' or '.join(sorted(engines))} has, or choose a framework that takes it"
    return "all keys: primus-cli direct -- config schema --text; settings of one framework go under 'backend_args:'"

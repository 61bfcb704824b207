"""Settings of other frameworks, of `foreign_keys.yaml` next to it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec import Struct

from primus.config.source import read_package_yaml


class ForeignKeys(Struct, frozen=True, kw_only=True):
    """What the file says; lists of names are separated by spaces."""

    synonyms: dict[str, str]
    """Other frameworks' keys by what to use instead."""
    engine_keys: dict[str, str]
    engine_prefixes: dict[str, str]
    unsupported_features: dict[str, str]


@cache
def read_foreign_keys() -> ForeignKeys:
    """The tables as written."""
    return read_package_yaml(Path(__file__).with_suffix(".yaml"), ForeignKeys)


@cache
def list_synonyms() -> dict[str, str]:
    """What to use instead of another framework's key, which is in lower case."""
    return _invert(read_foreign_keys().synonyms)


@cache
def list_engine_prefixes() -> dict[str, str]:
    """Engine of all keys that begin so."""
    return _invert(read_foreign_keys().engine_prefixes)


def _invert(table: dict[str, str]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names.split()}

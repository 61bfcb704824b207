"""Combinations of settings: the words of `--keys` as values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from primus.errors import UsageError

Settings = Mapping[str, str]
"""Value of each key, as typed."""
MAX_COMBINATIONS = 1000
COMMA = re.compile(r",(?![^\[]*\])")
"""A comma outside of brackets: `[1,2]` is one value."""


def parse_keys(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key of `key=value,value ...`.

    Raises:
        UsageError: A word is not an assignment, or a key is repeated.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        values = list(dict.fromkeys(value.strip() for value in COMMA.split(text)))
        if not equals or not key or "" in values:
            raise UsageError(f"--keys {word}: not a key with values", "write for example micro_batch_size=1,2,4")
        if key in found:
            raise UsageError(f"--keys: {key} is given twice", f"write all values once: {key}={','.join(values)}")
        found[key] = values
    return found


def list_combinations(keys: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination of the values.

    Raises:
        UsageError: There are more than `MAX_COMBINATIONS`.
    """
    count = 1
    for values in keys.values():
        count *= len(values)
    if count > MAX_COMBINATIONS:
        raise UsageError(
            f"--keys give {count:,} combinations; the limit is {MAX_COMBINATIONS}", "tune fewer keys at once"
        )
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*keys.values())]

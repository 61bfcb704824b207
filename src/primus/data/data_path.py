"""Token files as `train_data_path` names them: one prefix, several, or a blend with weights in Megatron's form."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from primus.data.indexed import bin_path, idx_path
from primus.errors import UsageError, did_you_mean


def weighted_prefixes(given: str | list[str | float] | None, key: str) -> list[tuple[Path, float | None]]:
    """Prefixes with their weights: one prefix, several without weights, or weight, prefix, weight, prefix, ...

    A string with spaces is read as such a list.

    Raises:
        UsageError: There is no such file, a weight is missing or no number above 0, or a prefix occurs twice.
    """
    if not given:
        return []
    words = _words(given) if isinstance(given, str) else list(given)
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        found: list[tuple[Path, float | None]] = [(resolve_prefix(str(word), key), None) for word in words]
    else:
        found = [(resolve_prefix(prefix, key), weight) for prefix, weight in _pairs(words, numbers, key)]
    twice = [path for path, times in Counter(path.resolve() for path, _ in found).items() if times > 1]
    if twice:
        raise UsageError(f"{key}: {twice[0]} is there twice", "give it once, with the sum of its weights")
    return found


def resolve_prefix(given: str, key: str) -> Path:
    """The prefix of a pair of .bin and .idx that a user means, given with or without extension or ``_text_document``.

    Raises:
        UsageError: There is no such pair; the message names the nearest.
    """
    path = Path(given).expanduser()
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    for candidate in (path, path.with_name(path.name + "_text_document")):
        if idx_path(candidate).exists() or bin_path(candidate).exists():
            return candidate
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise UsageError(f"{key}: no folder {folder}", "give the prefix of a .bin and .idx made by `data prepare`")
    found = {file.stem: file for file in sorted(folder.glob("*.idx"))}
    hint = did_you_mean(path.name, found) if found else f"there is no .idx in {folder}; make one with `data prepare`"
    raise UsageError(f"{key}: no {path}.idx", hint)


def _pairs(words: list[str | float], numbers: list[float | None], key: str) -> list[tuple[str, float]]:
    """Prefix and weight of each part of a blend."""
    pairs = []
    for weight, prefix in zip(numbers[::2], [*words[1::2], ""], strict=False):
        if weight is None or prefix == "" or _number(prefix) is not None:
            raise UsageError(f"{key}: a blend must be weight, prefix, weight, prefix, ...", f"found {words}")
        if not (weight > 0 and math.isfinite(weight)):
            raise UsageError(f"{key}: the weights of a blend must be positive", f"found {words}")
        pairs.append((str(prefix), weight))
    return pairs


def _words(given: str) -> list[str | float]:
    whole = Path(given).expanduser()
    one = idx_path(whole).exists() or whole.exists() or len(given.split()) == 1
    return [given] if one else list(given.split())


def _number(word: str | float) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None

"""Parse token files and their split: a prefix, several prefixes, a weighted blend, a pattern, or a folder."""

from __future__ import annotations

import errno
import glob
import math
import os
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from primus.config.text_file import check_has_end
from primus.errors import AbsentFileError, UsageError, did_you_mean

SHARES = ("training", "validation", "test")
WITHOUT_VALIDATION_DATA = "set valid_data_path or another split, or eval_iters: 0 to train without evaluation"

_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type, number of sequences and of borders (Megatron-LM megatron/core/datasets/indexed_dataset.py)."""
_INDEX_MAGIC = b"MMIDIDX\x00\x00"


def parse_weighted_prefixes(given: str | list[str | float] | None, key: str) -> list[tuple[Path, float | None]]:
    """Prefixes with their weights: one prefix, several without weights, or weight, prefix, weight, prefix, ...

    A string with spaces is read as such a list.

    Raises:
        AbsentFileError: A file does not exist.
        UsageError: A weight is missing or not above 0, or a prefix is repeated.
    """
    found = [(resolve_prefix(word, key), weight) for word, weight in parse_weighted_sources(given, key)]
    twice = [path for path, times in Counter(path.resolve() for path, _ in found).items() if times > 1]
    if twice:
        raise UsageError(f"{key}: {twice[0]} is named twice", "give it once, with the sum of its weights")
    return found


def parse_weighted_sources(given: str | list[str | float] | None, key: str) -> list[tuple[str, float | None]]:
    """Names with their weights, in the forms of `parse_weighted_prefixes`.

    Raises:
        UsageError: A weight is missing or not above 0.
    """
    if not given:
        return []
    words = _split_words(given) if isinstance(given, str) else list(given)
    numbers = [_parse_number(word) for word in words]
    if all(number is None for number in numbers):
        return [(str(word), None) for word in words]
    return [(prefix, weight) for prefix, weight in _parse_blend(words, numbers, key)]


def resolve_prefix(given: str, key: str) -> Path:
    """The prefix of a pair of .bin and .idx files, given with or without extension or ``_text_document``.

    Raises:
        AbsentFileError: The pair does not exist; the message names the nearest.
        UsageError: One of them is a device.
    """
    path = Path(os.path.expanduser(given))
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    for candidate in (path, path.parent / f"{path.name}_text_document"):
        if _has_files(candidate):
            for suffix in (".idx", ".bin"):
                file = candidate.parent / f"{candidate.name}{suffix}"
                check_has_end(file, f"{key}: {file}")
            return candidate
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        hint = f"the folder {folder} does not exist; give the prefix of a .bin and .idx made by `data prepare`"
        raise AbsentFileError(f"{key}: no such data: {path}.idx", hint)
    found = {file.stem: file for file in sorted(folder.glob("*.idx"))}
    hint = did_you_mean(path.name, found) if found else f"there is no .idx in {folder}; make one with `data prepare`"
    raise AbsentFileError(f"{key}: no such data: {path}.idx", hint)


def find_prefixes(given: Sequence[str]) -> list[Path]:
    """Prefixes, each once, in the order given; those of a pattern or of a folder in the order of their names.

    Raises:
        UsageError: A word matches no files, or a name is not UTF-8.
    """
    found = [prefix for word in given for prefix in _find_matches(word)]
    return list(dict.fromkeys(found))


def parse_split(split: str, key: str = "split") -> tuple[float, float, float]:
    """Shares of training, validation and test data, summing to 1, of a string like ``99,1,0``.

    Raises:
        UsageError: It is not one to three numbers of which the first is positive.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SHARES) or min(shares) < 0 or not 0 < sum(shares) < math.inf or shares[0] == 0:
        raise UsageError(f"{key} '{split}'", "give the shares of training, validation and test data, such as 99,1,0")
    first, second, third = (*shares, 0.0, 0.0)[:3]
    total = first + second + third
    return first / total, second / total, third / total


def count_documents(prefix: Path) -> int | None:
    """Documents of a token file by its index; None if it cannot be read, which is an error when the file is opened."""
    try:
        with prefix.with_name(f"{prefix.name}.idx").open("rb") as file:
            header: tuple[bytes, int, int, int, int] = _INDEX_HEADER.unpack(file.read(_INDEX_HEADER.size))
    except (OSError, struct.error):
        return None
    return header[3] if header[0] == _INDEX_MAGIC else None


def _parse_blend(words: list[str | float], numbers: list[float | None], key: str) -> list[tuple[str, float]]:
    """Prefix and weight of each part of a blend."""
    pairs = []
    for weight, prefix in zip(numbers[::2], [*words[1::2], ""], strict=False):
        if weight is None or prefix == "" or _parse_number(prefix) is not None:
            raise UsageError(f"{key}: a blend must be weight, prefix, weight, prefix, ...", f"found {words}")
        if not (weight > 0 and math.isfinite(weight)):
            raise UsageError(f"{key}: the weights of a blend must be positive", f"found {words}")
        pairs.append((str(prefix), weight))
    return pairs


def _split_words(given: str) -> list[str | float]:
    is_one = len(given.split()) == 1 or _has_files(Path(os.path.expanduser(given)), (".idx", ".bin", ""))
    return [given] if is_one else list(given.split())


def _has_files(prefix: Path, suffixes: Sequence[str] = (".idx", ".bin")) -> bool:
    try:
        return any((prefix.parent / f"{prefix.name}{suffix}").exists() for suffix in suffixes)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a long blend in one string
            return False
        raise


def _parse_number(word: str | float) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _find_matches(word: str) -> list[Path]:
    path = Path(os.path.expanduser(word))
    if path.is_dir():
        return _find_prefixes(sorted(path.iterdir()), word)
    if glob.has_magic(word) and not path.exists():
        named = {name for suffix in ("", ".bin", ".idx") for name in glob.glob(f"{path}{suffix}", recursive=True)}
        return _find_prefixes([Path(name) for name in sorted(named)], word)
    return [resolve_prefix(word, "prefix")]


def _find_prefixes(files: Sequence[Path], word: str) -> list[Path]:
    found = [file.with_suffix("") for file in files if file.suffix in (".bin", ".idx")]
    if not found:
        raise UsageError(
            f"{word}: no .bin or .idx there", "give the common prefix of a .bin and an .idx file, or a pattern"
        )
    for prefix in found:
        if not str(prefix).isprintable():
            raise UsageError(f"{str(prefix)!r}: the name has characters that cannot be printed", "rename the files")
    return found

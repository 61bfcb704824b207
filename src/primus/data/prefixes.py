"""The prefixes of token files that a user means: paths with or without extension, patterns, and folders."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from primus.data.data_path import resolve_prefix
from primus.errors import UsageError


def find(given: Sequence[str]) -> list[Path]:
    """Prefixes, each once, in the order given; those of a pattern or of a folder in the order of their names.

    Raises:
        UsageError: There are none for one of the words.
    """
    found = [prefix for word in given for prefix in _of(word)]
    return list(dict.fromkeys(found))


def _of(word: str) -> list[Path]:
    path = Path(word).expanduser()
    if path.is_dir():
        return _pairs(sorted(path.iterdir()), word)
    if glob.has_magic(word) and not path.exists():
        named = {name for suffix in ("", ".bin", ".idx") for name in glob.glob(f"{path}{suffix}", recursive=True)}
        return _pairs([Path(name) for name in sorted(named)], word)
    return [resolve_prefix(word, "prefix")]


def _pairs(files: Sequence[Path], word: str) -> list[Path]:
    found = [file.with_suffix("") for file in files if file.suffix in (".bin", ".idx")]
    if not found:
        raise UsageError(
            f"{word}: no .bin or .idx there", "give the prefix that a .bin and an .idx have, or a pattern of it"
        )
    return found

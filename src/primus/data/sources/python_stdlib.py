"""Python's own standard library: the sources and docstrings of the running interpreter, about 11 MB, no download."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from primus.errors import PrimusError

SKIPPED = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",  # tables of code points
        "idle_test",
        "idlelib",
        "pydoc_data",  # topics of help(), which are texts and no code
        "site-packages",
        "test",
        "tests",
    }
)
"""Folders that are not part of the library, or have no useful text."""

SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
"""Prefixes of files and folders with the build settings of this interpreter."""

FEWEST_FILES = 100


def version() -> str:
    """Implementation and version of the interpreter."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def documents() -> Iterator[str]:
    """Yield each module and each topic of the language reference, in an order that mixes packages.

    Raises:
        PrimusError: This interpreter has no sources of the standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = {f"topic {name}": text for name, text in _read_topics().items()}
    names = [*texts, *(str(file.relative_to(root)) for file in _list_modules(root))]
    if len(names) - len(texts) < FEWEST_FILES:
        raise PrimusError(f"{root}: no sources of the standard library", "use another dataset, or another Python")
    for name in sorted(names, key=_shuffle_key):
        yield texts[name] if name in texts else _read_source(root / name)


def _shuffle_key(name: str) -> str:
    """Sort key of a fixed order with unrelated neighbors, so that any part is a fair sample."""
    return hashlib.sha256(name.encode()).hexdigest()


def _list_modules(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name in SKIPPED or entry.name.startswith(SKIPPED_PREFIXES):
            continue
        if entry.is_dir():
            yield from _list_modules(entry)
        elif entry.suffix == ".py" and entry.stat().st_size:
            yield entry


def _read_source(path: Path) -> str:
    """Read a module in the encoding that it declares."""
    with tokenize.open(path) as file:
        return file.read()


def _read_topics() -> dict[str, str]:
    """Topics of the language reference that ``help()`` shows; empty if the interpreter has none."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {str(name): str(text) for name, text in topics.items()}

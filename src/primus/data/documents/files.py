"""Files of an input: found by path, pattern, folder or URL, and opened for reading."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from primus.data.documents import remote
from primus.data.documents.compression import DAMAGED, decompressed
from primus.data.documents.kinds import COLUMNS, KNOWN, RECORDS, TABLES, found_in_trees, is_remote, kind
from primus.errors import PrimusError, UsageError, did_you_mean

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
PATTERN = frozenset("*?[")


def find(given: str) -> list[str]:
    """The files that an input means, in a fixed order.

    Args:
        given: A file, a pattern (``data/*.jsonl``), a folder, of which every file counts whose suffix is known, or the
            URL of one of these (``s3://``, ``hf://``, ``https://``, which has files only).

    Raises:
        UsageError: It does not exist, is empty, or is of no known kind.
        PrimusError: Its host does not answer.
    """
    if is_remote(given):
        return _checked(given, remote.find(given))
    path = Path(given).expanduser()
    if path.is_dir():
        return _checked(given, [str(file) for file in _walk(path, set()) if found_in_trees(str(file))])
    if not path.exists() and PATTERN & set(given):
        return _matching(given)
    if not path.exists():
        raise UsageError(f"{given}: no such file or folder", _neighbours(path))
    if not kind(str(path)):
        raise UsageError(f"{given}: not a kind of file that has text", KNOWN)
    if not path.is_file():
        raise UsageError(f"{given}: not a file that can be read twice", "write its content to a file and give that")
    if not path.stat().st_size:
        raise UsageError(f"{given}: empty", "give a file that has text")
    return [str(path)]


def size_of(file: str) -> int:
    """Size of a path or URL in bytes; 0 where a server does not tell it.

    Raises:
        PrimusError: It cannot be read.
    """
    if is_remote(file):
        return remote.facts(file).size
    with whole_file_errors(file):
        return os.stat(file).st_size


def open_raw(file: str) -> BinaryIO:
    """The bytes of a path or URL.

    Raises:
        OSError: It is a path that cannot be opened.
        PrimusError: It is a URL that cannot be opened.
    """
    return remote.open_url(file) if is_remote(file) else open(file, "rb")


def open_seekable(file: str) -> BinaryIO:
    """The same, where it has to be read here and there.

    Raises:
        PrimusError: It is a URL whose server does not allow that.
    """
    stream = open_raw(file)
    if not stream.seekable():
        stream.close()
        problem = f"{file}: its server sends whole files only, and this kind is read in parts"
        raise PrimusError(problem, "download it and give the file")
    return stream


@contextmanager
def open_content(file: str) -> Iterator[BinaryIO]:
    """The bytes of a path or URL, decompressed as its name says; damage anywhere is an error that names the file.

    Raises:
        PrimusError: It cannot be read, is damaged or truncated.
    """
    with whole_file_errors(file), open_raw(file) as raw, decompressed(file, raw) as content:
        yield content


@contextmanager
def whole_file_errors(file: str) -> Iterator[None]:
    """Turn what goes wrong with a file as a whole into an error that names it."""
    try:
        yield
    except DAMAGED as error:
        raise PrimusError(f"{file}: damaged, {error}", "copy or download it again") from None
    except OSError as error:
        if error.errno is None:  # of Arrow, which says so for what it cannot decompress
            raise PrimusError(f"{file}: damaged, {error}", "copy or download it again") from None
        raise PrimusError(f"{file}: cannot be read, {error.strerror or error}") from None


def _checked(given: str, files: list[str]) -> list[str]:
    """Files of a folder or pattern, at least one of which has content."""
    if not files:
        raise UsageError(f"{given}: no text in this folder", KNOWN)
    if not is_remote(given) and not any(os.stat(file).st_size for file in files):
        raise UsageError(f"{given}: no text in this folder, only empty files", KNOWN)
    return files


def _matching(pattern: str) -> list[str]:
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    files = [file for file in found if _is_file(Path(file))]
    if not files:
        raise UsageError(f"{pattern}: no file matches", "put the pattern in quotes so that no shell changes it")
    known = [file for file in files if kind(file)]
    if not known:
        raise UsageError(f"{pattern}: no file that matches is of a kind that has text", KNOWN)
    return _checked(pattern, known)


def _walk(folder: Path, entered: set[tuple[int, int]]) -> Iterator[Path]:
    """Files below a folder, each folder once whatever links lead to it."""
    status = folder.stat()
    if (status.st_dev, status.st_ino) in entered:
        return
    entered.add((status.st_dev, status.st_ino))
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS:
            continue
        if entry.is_dir():
            yield from _walk(entry, entered)
        elif _is_file(entry):
            yield entry


def _is_file(path: Path) -> bool:
    """Whether a path that was found is a file.

    Raises:
        UsageError: It is a link to data that is not there.
    """
    if path.is_symlink() and not path.exists() and kind(str(path)) in RECORDS | COLUMNS | TABLES:
        raise UsageError(f"{path}: a link to nothing", "correct it or delete it")
    return path.is_file()


def _neighbours(path: Path) -> str:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, names) if len(names) <= 50 else ""

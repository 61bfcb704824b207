"""Find the files of an input by path, glob pattern, folder or URL, and open them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from primus import registry
from primus.config.text_file import check_has_end
from primus.data.readers import remote
from primus.data.readers.compression import DAMAGED, open_decompressed
from primus.data.readers.kinds import COLUMNS, KNOWN, RECORDS, TABLES, detect_kind, is_kept_in_trees, is_remote
from primus.errors import PrimusError, UsageError, did_you_mean

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
PATTERN = frozenset("*?[")


def find_files(given: str) -> list[str]:
    """Find the files of an input, in a fixed order.

    Args:
        given: A file, a glob pattern (``data/*.jsonl``), a folder (all its files with a known suffix), or a URL of one
            of these (``s3://``, ``hf://``; ``https://`` supports files only).

    Raises:
        UsageError: The input does not exist, is empty, or is of an unknown kind.
        PrimusError: The host does not respond.
    """
    if not given:
        raise UsageError("an input is an empty string", "give the path of a file or folder; . is this folder")
    if is_remote(given):
        return _require_content(given, remote.find_remote_files(given))
    path = Path(os.path.expanduser(given))
    if path.is_dir():
        return _require_content(given, [file for file in _walk_folder(str(path), set()) if is_kept_in_trees(file)])
    if not path.exists() and PATTERN & set(given):
        return _list_matching_files(given)
    if not path.exists():
        raise UsageError(f"{given}: no such file or folder", _suggest_path(given, path))
    check_has_end(path, given)
    if not detect_kind(str(path)):
        raise UsageError(f"{given}: unsupported kind of text file", KNOWN)
    if not path.is_file():
        raise UsageError(f"{given}: cannot be read twice", "write its content to a file and give that")
    if not path.stat().st_size:
        raise UsageError(f"{given}: empty", "give a file that has text")
    return [str(path)]


def would_contain(given: str, folder: Path) -> bool:
    """Whether `find_files` would find files in a folder, which need not exist yet.

    Args:
        given: An input, as for `find_files`.
        folder: Any folder; symbolic links to it, also from the input, are followed.
    """
    path, place = Path(os.path.expanduser(given)), Path(os.path.expanduser(folder)).resolve()
    if is_remote(given):
        return False
    if path.is_dir():
        looked_into = _list_folders(str(path), set())
        return any(_identify_folder(parent) in looked_into for parent in place.parents if parent.exists())
    return not path.exists() and _is_one_of(place, path.parent)


def read_size(file: str) -> int:
    """Size of a path or URL in bytes; 0 if the server does not report it.

    Raises:
        PrimusError: The file cannot be read.
    """
    if is_remote(file):
        return remote.read_remote_facts(file).size
    with explain_file_errors(file):
        return os.stat(file).st_size


def open_raw(file: str) -> BinaryIO:
    """Open a path or URL for reading bytes.

    Raises:
        OSError: The path cannot be opened.
        PrimusError: The URL cannot be opened.
    """
    return remote.open_url(file) if is_remote(file) else open(file, "rb")


def open_seekable(file: str) -> BinaryIO:
    """Open a path or URL for random access.

    Raises:
        PrimusError: The server of the URL does not support range requests.
    """
    stream = open_raw(file)
    if not stream.seekable():
        stream.close()
        problem = f"{file}: its server sends whole files only, and this kind is read in parts"
        raise PrimusError(problem, "download it and give the file")
    return stream


@contextmanager
def open_content(file: str) -> Iterator[BinaryIO]:
    """Open a path or URL and decompress it according to its suffix; errors within the block name the file.

    Raises:
        PrimusError: The file cannot be read, is damaged or truncated.
    """
    with explain_file_errors(file), open_raw(file) as raw, open_decompressed(file, raw) as content:
        yield content


@contextmanager
def explain_file_errors(file: str) -> Iterator[None]:
    """Convert exceptions about a file as a whole into errors that name the file."""
    try:
        yield
    except DAMAGED as error:
        raise PrimusError(f"{file}: damaged, {error}", "copy or download it again") from None
    except OSError as error:
        if error.errno is None:  # Arrow, if decompression fails
            raise PrimusError(f"{file}: damaged, {error}", "copy or download it again") from None
        raise PrimusError(f"{file}: cannot be read: {error.strerror or error}") from None


def _require_content(given: str, files: list[str]) -> list[str]:
    """Check that at least one file of a folder or pattern has content, and return the files."""
    if not files:
        raise UsageError(f"{given}: no text in this folder", f"{KNOWN}; plain .json only by name or pattern")
    if not is_remote(given) and not any(os.stat(file).st_size for file in files):
        raise UsageError(f"{given}: no text in this folder, only empty files", KNOWN)
    for file in files:
        try:
            file.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{file!r}: its name is not UTF-8", "rename it") from None
    return files


def _list_matching_files(pattern: str) -> list[str]:
    found = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    files = [file for file in found if _is_file(Path(file))]
    if not files:
        raise UsageError(f"{pattern}: no file matches", "put the pattern in quotes so that no shell changes it")
    known = [file for file in files if detect_kind(file)]
    if not known:
        raise UsageError(f"{pattern}: no matching file has a supported text format", KNOWN)
    return _require_content(pattern, known)


def _walk_folder(folder: str, entered: set[tuple[int, int]]) -> Iterator[str]:
    """Files below a folder. Each folder is entered once, even if several symbolic links lead to it."""
    identity = _identify_folder(folder)
    if identity in entered:
        return
    entered.add(identity)
    for entry in _list_entries(folder):
        path = entry.path.removeprefix("./")
        if entry.is_dir():
            yield from _walk_folder(path, entered)
        elif entry.is_file() or (entry.is_symlink() and _is_file(Path(path))):
            yield path


def _list_entries(folder: str) -> list[os.DirEntry[str]]:
    """Entries of a folder, sorted by name, without hidden entries and `SKIPPED_FOLDERS`."""
    with os.scandir(folder) as entries:
        shown = [each for each in entries if not each.name.startswith(".") and each.name not in SKIPPED_FOLDERS]
    return sorted(shown, key=lambda each: each.name)


def _list_folders(folder: str, entered: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Folders that `_walk_folder` enters; faster, because it does not examine files."""
    identity = _identify_folder(folder)
    if identity not in entered:
        entered.add(identity)
        for entry in _list_entries(folder):
            if entry.is_dir():
                _list_folders(entry.path, entered)
    return entered


def _identify_folder(folder: str | Path) -> tuple[int, int]:
    """Device and inode of a folder, which are the same for all its paths."""
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _is_one_of(place: Path, pattern: Path) -> bool:
    """Whether a folder matches a glob pattern."""
    parts = Path(os.path.abspath(pattern)).parts
    fixed = next((index for index, part in enumerate(parts) if PATTERN & set(part)), len(parts))
    return _matches_pattern(place.parts, (*Path(*parts[:fixed]).resolve().parts, *parts[fixed:]))


def _matches_pattern(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches_pattern(parts[skipped:], pattern[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches_pattern(parts[1:], pattern[1:])


def _is_file(path: Path) -> bool:
    """Whether a path is a file.

    Raises:
        UsageError: The path is a broken symbolic link to a data file.
    """
    if path.is_symlink() and not path.exists() and detect_kind(str(path)) in RECORDS | COLUMNS | TABLES:
        raise UsageError(f"{path}: broken link", "correct it or delete it")
    return path.is_file()


def _suggest_path(given: str, path: Path) -> str:
    if registry.has_plug_in("sources", given.partition(":")[0]):
        return f"to take the dataset of this name, give --dataset {given}"
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, names) if len(names) <= 50 else ""

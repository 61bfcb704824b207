"""What a comparison has made, so that `compare purge` removes that and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from primus.comparison.folder.archive import load_results
from primus.comparison.folder.comparison_folder import LOGS, RECORD, REPORT, RESULTS, ComparisonFolder
from primus.comparison.results.result import find_file_kind
from primus.errors import PrimusError, UsageError
from primus.runs import lock, store

TOKEN_FILES = (".bin", ".idx", ".manifest.json", ".tokenizer.json", ".bad.jsonl")
"""Ends of the names of token files; see `primus.data.megatron.manifest`."""
MANIFEST = ".manifest.json"
REPORT_FILES = ("report.html", "report.md", "report.json", "cells.csv", "*.png")
"""The files that `compare report` writes there."""


class TokenInput(Struct):
    """An input of token files."""

    path: str


class TokenManifest(Struct):
    """The part of a manifest that names the inputs; see `primus.data.megatron.manifest`."""

    inputs: list[TokenInput] = []


class PurgedPaths(Struct, frozen=True, kw_only=True):
    """What a purge of one comparison removes."""

    folder: str
    paths: list[str]
    """Files, and run folders as a whole."""
    kept: list[str]
    """Entries of the folder that primus did not make."""
    size_bytes: int


def find_purged_paths(folder: ComparisonFolder, *, has_data: bool) -> PurgedPaths:
    """What a purge of a comparison removes."""
    own = [path for path in _list_own_paths(folder) if os.path.lexists(path)]
    data = list(_list_token_files(folder)) if has_data else []
    kept = [
        str(path)
        for pattern in ("*", f"{RESULTS}/*", f"{LOGS}/*", f"{REPORT}/*", "runs/*/*")
        for path in sorted(folder.path.glob(pattern))
        if not (path.is_symlink() and path.name in store.LINKS) and path not in own and not _holds_only(path, own)
    ]
    paths = [*own, *data]
    return PurgedPaths(
        folder=str(folder.path),
        paths=[str(path) for path in paths],
        kept=kept,
        size_bytes=sum(_measure_size(path) for path in paths),
    )


def remove_paths(purged: PurgedPaths) -> None:
    """Remove the paths, and the folders that are empty then.

    Raises:
        UsageError: Another process uses the folder.
        PrimusError: A path cannot be removed.
    """
    folder = Path(purged.folder)
    with lock.hold_run(folder) as is_held:
        if not is_held:
            raise UsageError(f"{folder} is used by {lock.find_holder(folder)}", "wait until that comparison ends")
        # The record is the first of the list and removed last: an interrupted purge can be repeated.
        for name in [*purged.paths[1:], *purged.paths[:1]]:
            _remove_path(Path(name))
        (folder / lock.FILE).unlink()
    _remove_empty_folders(purged)


def _remove_empty_folders(purged: PurgedPaths) -> None:
    """Remove the folders that held the paths, innermost first, and links to runs that are gone."""
    # Of the data DATASET/TOKENIZER. The folder around the comparison or the data may be the user's.
    own = Path(purged.folder)
    folders = {
        parent
        for path in map(Path, purged.paths)
        for parent in (path.parents if own in path.parents else list(path.parents)[:2])
        if parent == own or own in parent.parents or own not in path.parents
    }
    for folder in sorted(folders, key=lambda path: -len(path.parts)):
        latest = folder / store.LATEST
        if latest.is_symlink() and not latest.exists():
            store.point_links(folder, "")
        with contextlib.suppress(OSError):  # it has other files, or is the working folder
            folder.rmdir()


def _list_own_paths(folder: ComparisonFolder) -> Iterator[Path]:
    """The record first, then results, reports, logs and runs."""
    record = folder.read_record()
    assert record is not None, "list_comparison_folders gives only folders with a record"
    yield folder.path / RECORD
    for path in sorted((folder.path / RESULTS).glob("*.json")):
        if _is_result(path):
            yield path
    for pattern in REPORT_FILES:
        yield from sorted(folder.path.glob(f"{REPORT}/{pattern}"))
    link = folder.picture_link
    if link.is_symlink() and os.readlink(link).startswith(f"{folder.path.name}/"):
        yield link
    yield from sorted(folder.runs.glob(lock.START_LOCKS))
    for name in record.cells:
        yield folder.find_log(name)
        yield from (run.directory for run in store.list_runs(folder.runs / name))


def _is_result(path: Path) -> bool:
    try:
        return not path.is_symlink() and find_file_kind(msgspec.json.decode(path.read_bytes())) == "primus"
    except (OSError, msgspec.DecodeError):
        return False


def _list_token_files(folder: ComparisonFolder) -> Iterator[Path]:
    """Token files that primus prepared for the named datasets of the cells."""
    with contextlib.suppress(PrimusError):
        used = {
            (str(result.settings.get("data_path") or "./data"), str(result.settings["dataset"]))
            for result in load_results([folder.path]).results
            if result.settings.get("dataset")
        }
        for data_path, dataset in sorted(used):
            for manifest in sorted(Path(os.path.expanduser(data_path)).glob(f"*/*/*{MANIFEST}")):
                if f"dataset:{dataset}" in _list_inputs(manifest):
                    prefix = manifest.name.removesuffix(MANIFEST)
                    files = (manifest.with_name(prefix + end) for end in TOKEN_FILES)
                    yield from (file for file in files if file.is_file() and not file.is_symlink())


def _list_inputs(manifest: Path) -> Sequence[str]:
    """The inputs of token files, as a manifest names them."""
    try:
        return [each.path for each in msgspec.json.decode(manifest.read_bytes(), type=TokenManifest).inputs]
    except (OSError, msgspec.MsgspecError):
        return []


def _holds_only(path: Path, own: Sequence[Path]) -> bool:
    """Whether a path is a folder on the way to what is removed, or the lock."""
    return path.name == lock.FILE or (path.is_dir() and any(path in each.parents for each in own))


def _remove_path(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise PrimusError(
            f"{path}: cannot be removed: {error.strerror}", "remove it with rm -r, or ask its owner"
        ) from None


def _measure_size(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(path) for name in names)

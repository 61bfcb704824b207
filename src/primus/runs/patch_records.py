"""Record the patch files of a run, so that a replay applies the same ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.errors import PrimusError, UsageError
from primus.runs.files import read_json, write_json
from primus.runs.store import Run

FOLDER = "env/patches"
"""Copies, as node 0 ran them."""

State = Literal["started", "applied", "skipped", "failed"]


class PatchRecord(Struct, frozen=True, kw_only=True):
    """One patch file of a run."""

    file: str
    """Path as given on the command line."""
    name: str
    """Its copy in the run's `env/patches`."""
    sha256: str
    """Hash of the file that was run."""
    is_masked: bool = False
    """Whether secrets of the file were removed from the copy."""
    state: State = "started"
    exit_code: int | None = None


def hash_patch(content: bytes) -> str:
    """Hash of a patch file."""
    return hashlib.sha256(content).hexdigest()


def index_path(node_rank: int) -> str:
    """The record of a node, in the run folder."""
    return f"env/node_{node_rank}/patches.json" if node_rank else "env/patches.json"


def read_records(run: Run, node_rank: int = 0) -> list[PatchRecord]:
    """The patch files of `run` in the order of their application on a node; empty if it had none.

    Raises:
        PrimusError: The record is damaged.
    """
    file = run.directory / index_path(node_rank)
    return read_json(file, list[PatchRecord]) if file.exists() else []


def read_all_records(run: Run) -> dict[int, list[PatchRecord]]:
    """The patch files of `run` by node.

    Raises:
        PrimusError: A record is damaged.
    """
    others = [int(file.parent.name.removeprefix("node_")) for file in run.directory.glob("env/node_*/patches.json")]
    return {node_rank: read_records(run, node_rank) for node_rank in [0, *sorted(others)]}


def write_records(directory: Path, node_rank: int, records: list[PatchRecord]) -> None:
    """Replace a node's record in the run folder `directory`."""
    write_json(directory / index_path(node_rank), records)


def keep_copy(directory: Path, record: PatchRecord, content: bytes) -> None:
    """Put the copy of a patch file into the run folder `directory`.

    Raises:
        PrimusError: It cannot be written.
    """
    path = directory / FOLDER / record.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise PrimusError(f"{path}: cannot be written: {error.strerror}") from None


def list_copies(run: Run) -> tuple[str, ...]:
    """The copies of the patch files of `run`, for a replay.

    Raises:
        PrimusError: A copy is missing, or was modified.
        UsageError: A copy lacks secrets.
    """
    return tuple(str(_check_intact(run.directory / FOLDER / record.name, record)) for record in read_records(run))


def _check_intact(path: Path, record: PatchRecord) -> Path:
    if record.is_masked:
        raise UsageError(
            f"the copy of patch {record.file} in the run folder lacks a secret", "pass the original file with --patch"
        )
    try:
        found = hash_patch(path.read_bytes())
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}", "pass the original file with --patch") from None
    if found != record.sha256:
        raise PrimusError(
            f"{path}: damaged: it differs from the patch that the run used", "pass the original file with --patch"
        )
    return path

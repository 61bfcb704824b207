"""What a run keeps of the patch files that it was launched with, so that a replay applies the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.errors import PrimusError, UsageError
from primus.runs.files import read_json, write_json
from primus.runs.store import Run

INDEX = "env/patches.json"
FOLDER = "env/patches"

State = Literal["started", "applied", "skipped", "failed"]


class PatchRecord(Struct, frozen=True, kw_only=True):
    """One patch file of a run."""

    file: str
    """As it was given."""
    name: str
    """Its copy in the run's `env/patches`."""
    sha256: str
    """Of what was run."""
    is_masked: bool = False
    """Whether the copy lacks secrets that the file held."""
    state: State = "started"
    exit_code: int | None = None


def sha256(content: bytes) -> str:
    """Hash of a patch file."""
    return hashlib.sha256(content).hexdigest()


def read(run: Run) -> list[PatchRecord]:
    """The patch files of `run` in the order of their application; none where it had none.

    Raises:
        PrimusError: The record is damaged.
    """
    index = run.directory / INDEX
    return read_json(index, list[PatchRecord]) if index.exists() else []


def write(run: Run, records: list[PatchRecord]) -> None:
    """Replace the record of a run."""
    write_json(run.directory / INDEX, records)


def keep(run: Run, record: PatchRecord, content: bytes) -> None:
    """Put the copy of a patch file into the run folder.

    Raises:
        PrimusError: It cannot be written.
    """
    path = run.directory / FOLDER / record.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise PrimusError(f"{path}: cannot be written: {error.strerror}") from None


def copies(run: Run) -> tuple[str, ...]:
    """The patch files of `run` to apply once more.

    Raises:
        PrimusError: A copy is missing, or is not what was run.
        UsageError: A copy lacks secrets.
    """
    return tuple(str(_intact(run.directory / FOLDER / record.name, record)) for record in read(run))


def _intact(path: Path, record: PatchRecord) -> Path:
    if record.is_masked:
        raise UsageError(
            f"the run's patch {record.file} held a secret, which its copy lacks", "give the file itself with --patch"
        )
    try:
        found = sha256(path.read_bytes())
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}", "give the file itself with --patch") from None
    if found != record.sha256:
        raise PrimusError(f"{path}: damaged: it is not the patch that the run had", "give the file itself with --patch")
    return path

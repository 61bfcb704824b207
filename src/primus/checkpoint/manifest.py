"""The manifest of a checkpoint: written last, so that a folder with one is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from primus.checkpoint.checksum import compute_checksum
from primus.checkpoint.shape import Shape
from primus.errors import PrimusError
from primus.runs.files import sync_to_disk, to_json

MANIFEST_NAME = "manifest.json"


class FileEntry(Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    name: str
    """Relative to the checkpoint's folder."""
    bytes: int
    """Its size."""
    checksum: str
    """In hexadecimal, by the manifest's algorithm."""


class CheckpointManifest(Struct, frozen=True, kw_only=True):
    """Content and files of a checkpoint."""

    version: int = 1
    """Version of the manifest's format."""
    backend: str
    """Backend that wrote it."""
    run: str
    """Id of the run that wrote it."""
    step: int
    """Optimizer steps taken."""
    consumed_samples: int
    """Samples that these steps consumed or skipped."""
    global_batch_size: int | None = None
    """Samples in a step; None in a checkpoint of an engine or of an earlier version."""
    recent_losses: list[float] = []
    """Losses before the step, oldest first; empty if the run does not look for loss spikes."""
    callbacks: dict[str, Any] = {}
    """State of callbacks by name, see `primus.callback.Callback.state_dict`."""
    model: Shape
    """Shape of the model, see `primus.checkpoint.shape`."""
    data_fingerprint: str
    """Identity of the training data."""
    compiled: bool
    """Whether the steps were taken by a compiled model."""
    world_size: int
    """Processes that wrote it."""
    torch_version: str
    """Version of the library that wrote its files."""
    created: float
    """Seconds since the epoch."""
    algorithm: str
    """Algorithm of the checksums."""
    files: list[FileEntry]
    """All files of the checkpoint except the manifest."""

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def build_entry(folder: Path, name: str, algorithm: str) -> FileEntry:
    """The entry of a file that is completely written."""
    path = folder / name
    return FileEntry(name=name, bytes=path.stat().st_size, checksum=compute_checksum(path, algorithm))


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Complete the checkpoint in `folder`: the manifest is durable on disk, and appears to readers in one step.

    Raises:
        OSError: It cannot be written.
    """
    path, temporary = folder / MANIFEST_NAME, folder / f".{MANIFEST_NAME}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(to_json(manifest) + "\n")
        file.flush()
        # Before the rename: a power cut must not leave a name without content.
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The rename is durable once the folder is, and the folder once its own name is.
    sync_to_disk(folder)
    sync_to_disk(folder.parent)


def read_manifest(folder: Path) -> CheckpointManifest | None:
    """The manifest of a checkpoint; None if there is none, which means that the checkpoint is not complete.

    Raises:
        PrimusError: It is damaged.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=CheckpointManifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PrimusError(f"{folder / MANIFEST_NAME}: cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PrimusError(f"{folder / MANIFEST_NAME}: damaged: {error}") from None


def find_damage(folder: Path, manifest: CheckpointManifest, part: int = 0, parts: int = 1) -> str:
    """The first damage of a checkpoint's files; empty if there is none.

    Several processes share the work: each checks every `parts`-th file, from `part` on.
    """
    found = (_find_file_damage(folder, file, manifest.algorithm) for file in manifest.files[part::parts])
    return next((problem for problem in found if problem), "")


def _find_file_damage(folder: Path, file: FileEntry, algorithm: str) -> str:
    try:
        size = (folder / file.name).stat().st_size
        # The size is free, and finds a truncated file before gigabytes are read.
        if size != file.bytes:
            return f"{file.name} has {size} bytes instead of {file.bytes}"
        if compute_checksum(folder / file.name, algorithm) != file.checksum:
            return f"{file.name} does not have its checksum"
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    return ""

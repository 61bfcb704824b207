"""The manifest of an archive: what it is an archive of, and the SHA-256 and size of each file."""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from primus.errors import PrimusError, UsageError
from primus.runs.store import RUN_ID

VERSION = 1
"""Version of the format; an archive of a later one is refused."""
MANIFEST = "MANIFEST.json"
"""First member, so that a reader knows what may follow before it reads it."""
RUN, DATA, CHECKOUT = "run", "data", "checkout"
"""Folders: the run folder; data, tokenizer and initial weights; the sources of primus with the differences applied."""
LARGEST_MANIFEST = 64 << 20
"""Bytes; 300,000 files."""
_PART = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}")


class ArchivedFile(Struct, frozen=True, kw_only=True):
    """One file of an archive."""

    name: str
    """Path in the archive, below its top folder."""
    size: int
    """Bytes."""
    sha256: str


class ArchiveManifest(Struct, frozen=True, kw_only=True):
    """The MANIFEST.json of an archive."""

    format_version: int = VERSION
    run: str
    """Run id."""
    experiment: str
    """Name of the experiment, which is the name of the folder around the run."""
    primus: str
    """Version of primus that wrote it."""
    omitted: list[str] = []
    """What the run has and the archive lacks, with the reason."""
    files: list[ArchivedFile]


class _AnyManifest(Struct, frozen=True):
    """What manifests of all versions have."""

    format_version: int


def parse_manifest(data: bytes, archive: str) -> ArchiveManifest:
    """The manifest of an archive, whose names and sizes are checked.

    Raises:
        UsageError: It is not one, or is of a later version.
        PrimusError: It is damaged, or names what no export writes.
    """
    try:
        found = msgspec.json.decode(data, type=_AnyManifest)
    except msgspec.MsgspecError:
        raise UsageError(f"{archive}: not an archive of a run", "runs export RUN --output FILE writes one") from None
    if found.format_version > VERSION:
        raise UsageError(
            f"{archive}: format version {found.format_version}; this version of primus reads up to {VERSION}",
            "update primus",
        )
    try:
        manifest = msgspec.json.decode(data, type=ArchiveManifest)
    except msgspec.MsgspecError as error:
        raise PrimusError(f"{archive}: {MANIFEST}: damaged: {error}", "ask for the archive again") from None
    _check_names(manifest, archive)
    return manifest


def _check_names(manifest: ArchiveManifest, archive: str) -> None:
    """Check that the manifest names a run, and each file once, below its folder."""
    if not RUN_ID.fullmatch(manifest.run):
        raise PrimusError(f"{archive}: '{manifest.run}' is not the id of a run")
    if not is_safe_name(manifest.experiment) or "/" in manifest.experiment:
        raise PrimusError(f"{archive}: '{manifest.experiment}' is not the name of an experiment")
    names = [file.name for file in manifest.files]
    folders = {name.rsplit("/", depth)[0] for name in names for depth in range(1, name.count("/") + 1)}
    for file in manifest.files:
        if not is_safe_name(file.name) or file.size < 0:
            raise PrimusError(f"{archive}: {file.name!r} is not the name of a file in the archive's folder")
        if file.name in folders or file.name == MANIFEST:
            raise PrimusError(f"{archive}: {file.name} is named twice")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PrimusError(f"{archive}: {twice} is named twice")


def is_safe_name(name: str) -> bool:
    """Whether a name leads to a file below a folder: it is relative, and has no `..` and no control characters."""
    return all(part not in (".", "..") and _PART.fullmatch(part) for part in name.split("/"))

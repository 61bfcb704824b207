"""Read the archive of a run: check all of it, then write the run into a workspace."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from primus.errors import PrimusError, UsageError
from primus.run_archive import run_files
from primus.run_archive.compression import check_ending, open_reader
from primus.run_archive.local_paths import CHECKOUT_PLACE, IMPORTED_DATA
from primus.run_archive.manifest import (
    CHECKOUT,
    DATA,
    LARGEST_MANIFEST,
    MANIFEST,
    RUN,
    ArchivedFile,
    ArchiveManifest,
    parse_manifest,
)
from primus.run_archive.tar_members import BLOCK, CHUNK, TarReader
from primus.runs import store
from primus.runs.store import Run, RunMetadata

METADATA = "metadata.json"
GUIDES = "archive"
"""Folder of an imported run with the files of the archive that are not of the run."""
SPARE_BYTES = 64 << 20
"""Free space that an import leaves."""

Member = tuple[ArchivedFile, Iterator[bytes]]


class ImportedRun(Struct, frozen=True, kw_only=True):
    """A run that was imported."""

    run: str
    """Its folder."""
    task: str
    size_bytes: int
    omitted: list[str]
    """What the archive lacks of the original run."""
    patches: list[str]
    """Patch files, which a replay executes."""
    plug_ins: list[str]
    """Folders with its plug-ins and hooks, which a replay needs in $PRIMUS_PLUGINS."""


def import_run(archive: Path, workspace: Path, environ: Mapping[str, str]) -> ImportedRun:
    """Write the run of an archive, or of the folder that one was unpacked to, into `workspace` by rename.

    Nothing is written before every name, size and hash was checked.

    Raises:
        UsageError: It is not an archive of a run, of a later version, or the run is there already.
        PrimusError: It is damaged, or holds something else than its manifest says.
    """
    with _open_members(archive) as (manifest, members):
        target = workspace / manifest.experiment / manifest.run
        if os.path.lexists(target):
            raise UsageError(
                f"{target} exists: the run has been imported, or is the original", "name another --workspace"
            )
        _check_space(manifest, workspace, archive)
        _check_run(archive, manifest, members)
    return _write_run(archive, manifest, workspace, environ)


def _write_run(archive: Path, manifest: ArchiveManifest, workspace: Path, environ: Mapping[str, str]) -> ImportedRun:
    target = workspace / manifest.experiment / manifest.run
    # Its name begins with a dot: what an interrupted import leaves is not a run.
    temporary = target.with_name(f".importing.{manifest.run}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        # Checked again while it is written: the file may have been replaced.
        with _open_members(archive) as (again, members):
            if again != manifest:
                raise PrimusError(f"{archive}: changed while it was imported")
            for entry, content in members:
                _write_file(temporary, entry, content)
        run_files.restore_run_files(temporary, _list_places(target, workspace, environ))
        try:
            os.rename(temporary, target)
        except OSError:  # not empty: another import was faster
            raise UsageError(f"{target} exists: the run has just been imported") from None
    except OSError as error:
        problem = f"{target}: cannot be written: {error.strerror or error}"
        raise PrimusError(problem, "free some space, or name another --workspace") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder of the experiment, if it is empty
            target.parent.rmdir()
    store.point_links(target.parent, store.list_runs(target.parent)[-1].id)
    patches, plug_ins = target / "env/patches", target / run_files.PLUG_INS
    return ImportedRun(
        run=str(target),
        task=Run(target).read_metadata().task,
        size_bytes=sum(entry.size for entry in manifest.files),
        omitted=manifest.omitted,
        patches=[str(path) for path in sorted(patches.glob("*"))],
        plug_ins=[str(path) for path in sorted(plug_ins.glob("*"))],
    )


def _list_places(target: Path, workspace: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The folders of this machine by the names of an archive."""
    run = str(target.parent.resolve() / target.name)
    return {
        "<run>": run,
        IMPORTED_DATA: f"{run}/{DATA}",
        "<workspace>": str(workspace.resolve()),
        "<folder>": str(Path.cwd()),
        "<environment>": sys.prefix,
        **CHECKOUT_PLACE,
        "<home>": environ.get("HOME") or os.path.expanduser("~"),
    }


def _check_run(archive: Path, manifest: ArchiveManifest, members: Iterator[Member]) -> None:
    """Read all members, which checks them, and compare the run in the archive with the manifest."""
    names, metadata = {entry.name for entry in manifest.files}, b""
    missing = [f"{RUN}/{name}" for name in (METADATA, *run_files.NEEDED) if f"{RUN}/{name}" not in names]
    if missing:
        raise PrimusError(f"{archive}: not complete: it lacks {missing[0]}", "ask for the archive again")
    for entry, content in members:
        is_metadata = entry.name == f"{RUN}/{METADATA}" and entry.size <= LARGEST_MANIFEST
        for chunk in content:
            metadata += chunk if is_metadata else b""
    try:
        found = msgspec.json.decode(metadata, type=RunMetadata)
    except msgspec.MsgspecError as error:
        raise PrimusError(f"{archive}: {RUN}/{METADATA}: damaged: {error}", "ask for the archive again") from None
    if (found.id, found.name) != (manifest.run, manifest.experiment):
        raise PrimusError(f"{archive}: {MANIFEST} is not of the run in it", "ask for the archive again")


def _write_file(folder: Path, entry: ArchivedFile, content: Iterator[bytes]) -> None:
    """Write a file of the archive to its place in the run folder; the sources of primus stay in the archive."""
    top, _, rest = entry.name.partition("/")
    if top == CHECKOUT:
        for _ in content:
            pass
        return
    path = folder / (rest if top == RUN else entry.name if top == DATA else f"{GUIDES}/{entry.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:  # two entries for one place would be an error
            for chunk in content:
                file.write(chunk)
    except OSError as error:  # here, so that it is not taken for an error of the archive
        problem = f"{path}: cannot be written: {error.strerror}"
        raise PrimusError(problem, "free some space, or name another --workspace") from None


def _check_space(manifest: ArchiveManifest, workspace: Path, archive: Path) -> None:
    """Check that the files fit on the disk, before gigabytes of zeros are unpacked from kilobytes."""
    existing = next(place for place in (workspace.absolute(), *workspace.absolute().parents) if place.exists())
    free, size = shutil.disk_usage(existing).free, sum(entry.size for entry in manifest.files)
    if size + SPARE_BYTES > free:
        raise PrimusError(
            f"{archive}: its files have {size:,} bytes, and {existing} has {free:,} free",
            "free some space, or name another --workspace",
        )


@contextlib.contextmanager
def _open_members(archive: Path) -> Iterator[tuple[ArchiveManifest, Iterator[Member]]]:
    """The manifest of an archive, and its other members with their content, which is checked while it is read."""
    if archive.is_dir():
        manifest = parse_manifest(_read_folder_manifest(archive), str(archive))
        yield manifest, _read_folder(archive, manifest)
        return
    if not archive.is_file():  # a device may have no end
        raise UsageError(f"{archive}: no such file", "name the archive that runs export has written")
    with open_reader(archive, check_ending(archive)) as stream:
        reader = TarReader(stream, str(archive))
        top, manifest = _read_manifest(reader, archive)
        yield manifest, _read_members(reader, stream, archive, top, manifest)


def _read_manifest(reader: TarReader, archive: Path) -> tuple[str, ArchiveManifest]:
    header = reader.read_header()
    name, size = header or ("", 0)
    top, slash, rest = name.partition("/")
    if rest != MANIFEST or not slash:
        raise UsageError(f"{archive}: not an archive of a run", "runs export RUN --output FILE writes one")
    if size > LARGEST_MANIFEST:
        raise PrimusError(f"{archive}: its {MANIFEST} has {size:,} bytes", "do not use it: no export writes such one")
    return top, parse_manifest(b"".join(reader.read_content()), str(archive))


def _read_members(
    reader: TarReader, stream: BinaryIO, archive: Path, top: str, manifest: ArchiveManifest
) -> Iterator[Member]:
    expected = {f"{top}/{entry.name}": entry for entry in manifest.files}
    while header := reader.read_header():
        name, size = header
        entry = expected.pop(name, None)
        if entry is None:
            known = name in {f"{top}/{each.name}" for each in manifest.files}
            raise PrimusError(
                f"{archive}: {name!r} {'is there twice' if known else 'is not in its manifest'}",
                "do not use it: it was changed after runs export",
            )
        # Before the content: a few bytes may become terabytes.
        if size != entry.size:
            raise PrimusError(f"{archive}: {name!r} has {size} bytes instead of {entry.size}", "copy the archive again")
        yield entry, _check_content(reader.read_content(), entry, archive)
    _check_rest(stream, archive)
    _check_complete([entry.name for entry in expected.values()], archive)


def _check_rest(stream: BinaryIO, archive: Path) -> None:
    """Check that nothing follows the end but zeros, as far as a program fills its last record."""
    rest = stream.read(20 * BLOCK + 1)  # tar(1): records of 20 blocks
    if rest.strip(b"\0") or len(rest) > 20 * BLOCK:
        raise PrimusError(f"{archive}: something follows its end", "do not use it: it was changed after runs export")


def _check_complete(missing: list[str], archive: Path) -> None:
    if missing:
        raise PrimusError(f"{archive}: {missing[0]} is missing", "copy the archive again")


def _check_content(content: Iterator[bytes], entry: ArchivedFile, archive: Path) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for chunk in content:
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != entry.sha256:
        raise PrimusError(f"{archive}: {entry.name} does not have its checksum", "copy the archive again")


def _read_folder_manifest(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError:
        problem = f"{folder}: not an archive of a run: it has no {MANIFEST}"
        raise UsageError(problem, "name the archive that runs export has written") from None


def _read_folder(folder: Path, manifest: ArchiveManifest) -> Iterator[Member]:
    """The files of an unpacked archive."""
    expected = {entry.name: entry for entry in manifest.files}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]  # written when the unpacked sources run
        for path in (Path(place, name) for name in sorted([*folders, *names])):
            name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
            if stat.S_ISDIR(mode) or name == MANIFEST:
                continue
            if name not in expected or not stat.S_ISREG(mode):
                what = "is not in its manifest" if name not in expected else "is not a regular file"
                raise PrimusError(f"{folder}: {name!r} {what}", "unpack the archive again")
            entry = expected.pop(name)
            yield entry, _check_content(_read_file(path, entry, folder), entry, folder)
    _check_complete(list(expected), folder)


def _read_file(path: Path, entry: ArchivedFile, folder: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != entry.size:
            raise PrimusError(f"{folder}: {entry.name} does not have its size", "unpack the archive again")
        while chunk := file.read(CHUNK):
            yield chunk

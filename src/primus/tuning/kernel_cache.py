"""Archives of the kernels that Inductor compiled: made once, kept, unpacked on other nodes and in new containers."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from msgspec import structs

from primus.errors import PrimusError
from primus.runs.files import read_json, write_json
from primus.runs.tuned_files import TunedFile

FORMAT = 1


class KernelCache(TunedFile, frozen=True, kw_only=True):
    """An archive and what it is valid for; its file is next to the archive."""

    format: int = FORMAT
    archive: str
    """Name of the archive."""
    sha256: str
    num_files: int
    cold_s: float
    """First step of a run that compiled everything."""
    warm_s: float | None = None
    """First step of a run that unpacked the archive."""

    @property
    def is_faster(self) -> bool:
        """Whether a start with the archive is quicker."""
        return self.warm_s is not None and self.warm_s < self.cold_s


def read_kernel_cache(path: Path) -> KernelCache:
    """Read the description of an archive.

    Raises:
        PrimusError: It is missing, damaged, or of another format.
    """
    found = read_json(path, KernelCache)
    if found.format != FORMAT:
        raise PrimusError(f"{path}: format {found.format}, this version reads {FORMAT}", "run tune inductor again")
    return found


def pack_cache(folder: Path, archive: Path) -> tuple[str, int]:
    """Write the files of `folder` into an archive; gives its checksum and the number of files.

    Raises:
        PrimusError: There are no files, or the disk is full.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    if not files:
        raise PrimusError(f"Inductor has left no kernels in {folder}", "the model was not compiled: see the run's log")
    temporary = archive.with_name(f".{archive.name}.tmp.{os.getpid()}")
    try:
        with tarfile.open(temporary, "w") as packed:
            for path in files:
                packed.add(path, path.relative_to(folder))
        digest = _hash_file(temporary)
        os.replace(temporary, archive)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PrimusError(f"{archive}: cannot be written: {error.strerror}", "free some space") from None
    return digest, len(files)


def keep_cache(cache: KernelCache, folder: Path, path: Path) -> None:
    """Copy an archive to the store; its description follows, so that it never names an archive that is incomplete."""
    name = f"{path.stem}-{cache.sha256[:12]}.tar"
    temporary = path.with_name(f".{name}.tmp.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / cache.archive, temporary)
    os.replace(temporary, path.with_name(name))
    older = read_kernel_cache(path).archive if path.is_file() else ""
    write_json(path, structs.replace(cache, archive=name))
    # Last: a run that has read the older description finds no archive, says so, and compiles.
    if older and older != name:
        path.with_name(older).unlink(missing_ok=True)


def find_local_folder(cache: KernelCache) -> Path:
    """Where an archive is unpacked: on the local disk, since every kernel is a file that each process opens."""
    return Path(tempfile.gettempdir()) / f"primus-{os.getuid()}" / f"inductor-{cache.sha256[:16]}"


def unpack_cache(path: Path, cache: KernelCache) -> Path:
    """Unpack an archive to this machine's disk, unless it is there; gives the folder.

    Raises:
        PrimusError: The archive is missing or damaged, or the disk is full.
    """
    folder, archive = find_local_folder(cache), path.with_name(cache.archive)
    if folder.is_dir():
        return folder
    try:
        if _hash_file(archive) != cache.sha256:
            raise PrimusError(f"{archive}: damaged: its checksum differs", "run tune inductor again")
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # In a folder that everybody can write, another user may have made it; the archive holds code that runs.
        if folder.parent.stat().st_uid != os.getuid():
            raise PrimusError(f"{folder.parent} belongs to another user", "set TMPDIR")
        # Renamed when it is complete: processes of one node unpack at the same time, and the first one wins.
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        with tarfile.open(archive) as packed:
            packed.extractall(temporary, filter="data")
        try:
            os.rename(temporary, folder)
        except OSError:
            shutil.rmtree(temporary)
            if not folder.is_dir():
                raise
    except (OSError, tarfile.TarError) as error:
        raise PrimusError(f"{archive}: cannot be unpacked: {error}") from None
    return folder


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

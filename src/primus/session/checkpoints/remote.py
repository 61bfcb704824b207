"""Copies of checkpoints in an object store or at another URL of fsspec.

A checkpoint is written to a local folder first, and each process uploads the files that it has written; the manifest is
the last object, so that a copy without one was interrupted, and no reader loads it. A store needs no rename. Loading
downloads to a local folder, in which the manifest appears last as well.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from primus.checkpoint.folders import STEP
from primus.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest
from primus.errors import PrimusError, UsageError
from primus.runs.files import to_json


def is_remote(place: str | None) -> bool:
    """Whether a value of `save:` or `load:` is a URL."""
    return place is not None and "://" in place


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of checkpoints at a URL, or one checkpoint in it.

    Raises:
        UsageError: The protocol is unknown, or its package is not installed.
    """

    url: str
    _system: Any = field(init=False, repr=False)
    _root: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from primus.data.readers.remote import find_file_system  # not for runs whose checkpoints are local

        system, root = find_file_system(self.url)
        object.__setattr__(self, "_system", system)
        object.__setattr__(self, "_root", root.rstrip("/"))

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Copy files of a checkpoint, whose folder has the name of its step."""
        for name in names:
            target = self._join(folder.name, name)
            self._system.makedirs(posixpath.dirname(target), exist_ok=True)
            self._system.put_file(str(folder / name), target)

    def complete(self, step_name: str, manifest: CheckpointManifest) -> None:
        """Write the manifest, from which on the checkpoint counts."""
        self._system.pipe_file(self._join(step_name, MANIFEST_NAME), (to_json(manifest) + "\n").encode())

    def list_complete(self) -> list[str]:
        """Names of the complete checkpoints, oldest first.

        Raises:
            PrimusError: The store cannot be read.
        """
        self._system.invalidate_cache()
        try:
            found = [posixpath.basename(each.rstrip("/")) for each in self._system.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise PrimusError(f"{self.url}: cannot be listed: {error}", "check the address and your rights") from None
        steps = sorted(name for name in found if STEP.fullmatch(name))
        return [name for name in steps if self._system.exists(self._join(name, MANIFEST_NAME))]

    def remove(self, step_name: str) -> None:
        """Delete a checkpoint, its manifest first; one that is not there is none."""
        for path, recursive in ((self._join(step_name, MANIFEST_NAME), False), (self._join(step_name), True)):
            if self._system.exists(path):
                self._system.rm(path, recursive=recursive)

    def prune(self, keep: int) -> None:
        """Delete all complete checkpoints but the newest `keep`."""
        for name in self.list_complete()[:-keep]:
            self.remove(name)

    def read_manifest(self, step_name: str) -> CheckpointManifest:
        """The manifest of a complete checkpoint.

        Raises:
            PrimusError: It is damaged.
        """
        try:
            return msgspec.json.decode(
                self._system.cat_file(self._join(step_name, MANIFEST_NAME)), type=CheckpointManifest
            )
        except msgspec.MsgspecError as error:
            raise PrimusError(f"{self.url}/{step_name}/{MANIFEST_NAME}: damaged: {error}") from None

    def download(self, step_name: str, folder: Path) -> Path:
        """Copy a complete checkpoint into `folder`, its manifest last; checksums are compared by who loads it.

        Raises:
            PrimusError: The manifest is damaged.
        """
        target, manifest = folder / step_name, self.read_manifest(step_name)
        for file in manifest.files:
            (target / file.name).parent.mkdir(parents=True, exist_ok=True)
            self._system.get_file(self._join(step_name, file.name), str(target / file.name))
        temporary = target / f".{MANIFEST_NAME}.tmp"
        self._system.get_file(self._join(step_name, MANIFEST_NAME), str(temporary))
        os.replace(temporary, target / MANIFEST_NAME)
        return target

    def _join(self, *names: str) -> str:
        return posixpath.join(self._root, *names)


def fetch_given(url: str, folder: Path) -> Path:
    """A local copy in `folder` of the checkpoint that `load:` names, or of the newest in that folder of checkpoints.

    Raises:
        UsageError: The URL names no complete checkpoint.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    remote = RemoteFolder(parent if STEP.fullmatch(name) else url)
    complete = remote.list_complete()
    wanted = name if STEP.fullmatch(name) else next(reversed(complete), "")
    if wanted not in complete:
        others = f"complete ones there: {', '.join(complete[-5:])}" if complete else ""
        raise UsageError(f"load: no complete checkpoint at {url}", others or "a complete one has a " + MANIFEST_NAME)
    if (folder / wanted / MANIFEST_NAME).exists():
        return folder / wanted
    return remote.download(wanted, folder)

"""Record the sources of a run: the commit and the differences of the checkout, and the files of the user's plug-ins."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus import registry
from primus.process import read_output
from primus.redaction import redact
from primus.runs.files import read_json, write_json, write_text
from primus.runs.store import Run

SOURCES_FILE, DIFFERENCES_FILE = "env/sources.json", "env/checkout.diff"
PLUG_INS_FILE = "env/plug-ins.json"
LARGEST_FILE = 1 << 20
"""Bytes of a file that is recorded; a larger one is not a source."""
MOST_NEW_FILES = 20
"""Files that git does not know and that are kept: git is started for each of them."""
MOST_FILES = 500
"""Files of plug-ins that are recorded: $PRIMUS_PLUGINS may be a folder that holds something else, too."""
LIMIT_S = 10.0
"""For git, on a slow file system."""
_NAMES = ("src", "examples", "primus-cli", "pyproject.toml", "constraints.txt")
"""Parts of a checkout that can change what a run does."""


class SourceRecord(Struct, frozen=True, kw_only=True):
    """The primus that a run was started by, and its checkout if it has one."""

    package_sha256: str
    """Hash of the package's Python files: the same in a checkout, its copy and a wheel."""
    revision: str = ""
    """Commit; empty without a checkout."""
    differences_sha256: str = ""
    """Hash of the differences from the commit; empty if there are none."""
    is_masked: bool = False
    """Whether secrets were removed from the differences, so that they cannot be applied."""
    omitted: list[str] = []
    """Files that git does not know and that are not kept: too large, or too many."""

    def __str__(self) -> str:
        changes = f" with the differences {self.differences_sha256[:8]}" if self.differences_sha256 else ""
        return f"commit {self.revision[:12]}{changes}" if self.revision else f"package {self.package_sha256[:12]}"


class PlugInRecord(Struct, frozen=True, kw_only=True):
    """A file of the user's plug-ins or hooks."""

    name: str
    """Number of its folder, and path in it: `0/callbacks/stop.py`."""
    path: str
    sha256: str


def record_sources(run: Run, folders: Sequence[Path]) -> None:
    """Write the records into a run folder.

    Of plug-ins it holds hashes: their text may hold secrets that nothing but its author knows.

    Args:
        run: The run.
        folders: Folders of the user's plug-ins and hooks.

    Raises:
        PrimusError: They cannot be written.
    """
    sources, differences = read_sources()
    write_json(run.directory / SOURCES_FILE, sources)
    if differences:
        write_text(run.directory / DIFFERENCES_FILE, differences)
    files = [
        PlugInRecord(name=name, path=str(path.absolute()), sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for name, path in list_plug_in_files(folders)
    ]
    if files:
        write_json(run.directory / PLUG_INS_FILE, files)


def read_sources() -> tuple[SourceRecord, str]:
    """This primus, with the differences of its checkout from the commit."""
    found = SourceRecord(package_sha256=hash_package(registry.PACKAGE))
    root = registry.PACKAGE.parents[1]
    # The second one fails where another repository holds the environment that has the package.
    revision = read_output(["git", "rev-parse", "HEAD", "HEAD:./src/primus"], timeout_s=LIMIT_S, cwd=root)
    if not revision:
        return found, ""
    parts = [name for name in _NAMES if (root / name).exists()]
    look = ["git", "--no-optional-locks"]
    patch = ["diff", "--binary", "--no-ext-diff", "--no-color"]
    texts = [_read_text([*look, *patch, "--relative", "HEAD", "--", *parts], root)]
    listed = _read_text([*look, "ls-files", "--others", "--exclude-standard", "-z", "--", *parts], root) or ""
    new = [name for name in sorted(filter(None, listed.split("\0"))) if (root / name).is_file()]
    kept = [name for name in new if (root / name).stat().st_size <= LARGEST_FILE][:MOST_NEW_FILES]
    texts += [_read_text([*look, *patch, "--no-index", "--", "/dev/null", name], root) for name in kept]
    if None in texts:
        return found, ""
    differences = "".join(filter(None, texts))
    found = structs.replace(
        found,
        revision=revision.split()[0],
        differences_sha256=hashlib.sha256(differences.encode("utf-8", "surrogateescape")).hexdigest()
        * bool(differences),
        is_masked=redact(differences) != differences,
        omitted=[name for name in new if name not in kept],
    )
    return found, differences


def hash_package(package: Path) -> str:
    """Hash of the names and contents of the Python files below a folder."""
    digest, start = hashlib.sha256(), len(str(package)) + 1
    for folder, folders, files in os.walk(package):
        # Examples are a link in a checkout, and a folder elsewhere.
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "examples"))
        for name in sorted(name for name in files if name.endswith(".py")):
            path = os.path.join(folder, name)
            with open(path, "rb", buffering=0) as file:
                data = file.read()
            digest.update(f"{path[start:]}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def read_source_record(run: Run) -> SourceRecord | None:
    """The primus of a run; None if an earlier version started it.

    Raises:
        PrimusError: The record is damaged.
    """
    file = run.directory / SOURCES_FILE
    return read_json(file, SourceRecord) if file.is_file() else None


def read_plug_in_records(run: Run) -> list[PlugInRecord]:
    """The files of the plug-ins of a run; empty if it had none.

    Raises:
        PrimusError: The record is damaged.
    """
    file = run.directory / PLUG_INS_FILE
    return read_json(file, list[PlugInRecord]) if file.is_file() else []


def list_plug_in_files(folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Name and path of each file below `folders` that is recorded."""
    number = 0
    for index, root in enumerate(folders):
        for folder, names, files in os.walk(root):
            names[:] = sorted(name for name in names if not name.startswith((".", "__pycache__")))
            for path in (Path(folder, name) for name in sorted(files)):
                if path.name.startswith(".") or path.suffix == ".pyc" or not path.is_file():
                    continue
                if path.stat().st_size <= LARGEST_FILE and number < MOST_FILES and os.access(path, os.R_OK):
                    number += 1
                    yield f"{index}/{path.relative_to(root)}", path


def _read_text(words: Sequence[str], root: Path) -> str | None:
    """The whole output of git, as a patch ends in a line feed; None if it does not answer. Differences are no failure.

    A run does not wait long for its record, and does not fail without it.
    """
    try:
        done = subprocess.run(words, cwd=root, capture_output=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode in (0, 1) else None

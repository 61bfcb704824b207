"""The folder that an engine builds an image from: the files of the checkout, with the time of its commit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from primus import package_files
from primus.errors import PrimusError
from primus.process import read_output

PARTS = (
    *("primus-cli", "pyproject.toml", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE"),
    *("src", "examples", "tools"),
)
"""What an image needs of the checkout."""
CONTAINERFILE = "Containerfile"


class CheckoutVersion(Struct, frozen=True):
    """Where the files are from."""

    root: Path
    revision: str
    """Commit; with `-dirty` if files differ from it, empty without git."""
    epoch: int
    """Time of the commit; 0 without git."""


def read_checkout(environ: Mapping[str, str]) -> CheckoutVersion:
    """The checkout that this command runs from; `SOURCE_DATE_EPOCH` replaces the time of its commit.

    Raises:
        PrimusError: primus is installed without a checkout.
    """
    root = package_files.CHECKOUT
    if root is None:
        raise PrimusError(
            f"{package_files.PACKAGE}: not in a checkout", "clone the repository: an image holds its files"
        )
    revision = read_output(["git", "-C", str(root), "rev-parse", "HEAD"]) or ""
    changed = read_output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"]) if revision else ""
    time = environ.get("SOURCE_DATE_EPOCH") or read_output(["git", "-C", str(root), "log", "-1", "--format=%ct"]) or "0"
    if not time.isdecimal():
        raise PrimusError(f"SOURCE_DATE_EPOCH={time}: not a number of seconds")
    return CheckoutVersion(root, revision + "-dirty" * bool(changed), int(time))


def write_context(folder: Path, checkout: CheckoutVersion, containerfile: str) -> None:
    """Fill the folder with the tracked files of the checkout; all have the same time, owner and modes."""
    listed = read_output(["git", "-C", str(checkout.root), "ls-files", "-z", "--", *PARTS], timeout_s=30.0)
    names = listed.split("\0") if listed else _list_files(checkout.root)
    for name in sorted(filter(None, names)):
        source, target = checkout.root / name, folder / name
        if not source.exists():  # deleted
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():  # the package's link to a folder beside it
            target.symlink_to(os.readlink(source))
            continue
        shutil.copyfile(source, target)
        target.chmod(0o755 if os.access(source, os.X_OK) else 0o644)
    (folder / CONTAINERFILE).write_text(containerfile)
    for place, folders, files in os.walk(folder, topdown=False):
        for name in [*folders, *files]:
            os.utime(Path(place, name), (checkout.epoch, checkout.epoch))


def _list_files(root: Path) -> list[str]:
    """Files without git, as in an unpacked archive."""
    found = []
    for part in PARTS:
        paths = [root / part] if (root / part).is_file() else (root / part).rglob("*")
        files = [path for path in paths if path.is_file() or path.is_symlink()]
        found += [str(path.relative_to(root)) for path in files if "__pycache__" not in path.parts]
    return found

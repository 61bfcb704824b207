"""Mount folders at the same paths inside the container, so that paths in configurations and logs are valid in both."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from primus import package_files
from primus.errors import UsageError
from primus.plan import BindMount

PLACES = (
    "PRIMUS_PLUGINS",
    "PRIMUS_ENGINES",
    "PRIMUS_HOOKS",
    "PRIMUS_VENV",
    "HF_HOME",
    "DATA_PATH",
    "TOKENIZED_DATA_PATH",
    "BACKEND_PATH",
)
"""Variables that name folders, separated by `:`; existing folders are mounted."""


def parse_mounts(words: Iterable[str], cwd: str) -> list[BindMount]:
    """The mounts of `--mount`: SRC[:DST[:ro|rw]].

    Raises:
        UsageError: One has another format.
    """
    return [_parse_mount(word, cwd) for word in words]


def _parse_mount(word: str, cwd: str) -> BindMount:
    source, *rest = word.split(":")
    mode = rest.pop() if len(rest) > 1 else "rw"
    target = rest.pop() if rest else source
    if rest or not source or mode not in ("ro", "rw") or (target != source and not target.startswith("/")):
        raise UsageError(
            f"--mount {word}: expected SRC[:DST[:ro]] with an absolute DST",
            "for a path with a colon, or other options: --mount type=bind,source=SRC,target=DST,...",
        )
    source = os.path.normpath(os.path.join(cwd, os.path.expanduser(source)))
    return BindMount(source, os.path.normpath(target) if target.startswith("/") else source, mode == "ro")


def list_own_mounts(
    cwd: str, directory: str, environ: Mapping[str, str], *, has_run: bool, is_here: bool
) -> list[BindMount]:
    """The checkout (or the environment that primus is installed in), the working directory and the workspace.

    Args:
        cwd: Working directory.
        directory: Run folder, or empty.
        environ: Variables, some of which name folders.
        has_run: Whether the task has a run folder.
        is_here: Whether the container starts on this host, so that folders of variables can be checked.
    """
    checkout = package_files.CHECKOUT
    code = [BindMount(str(checkout), str(checkout))] if checkout else _list_installation_mounts()
    places = [cwd] + ([_find_workspace(directory)] if has_run and directory else [])
    if is_here:
        named = [folder for name in PLACES for folder in environ.get(name, "").split(os.pathsep)]
        places += [os.path.abspath(folder) for folder in named if folder and os.path.isdir(folder)]
    return [*code, *(BindMount(place, place) for place in places)]


def _list_installation_mounts() -> list[BindMount]:
    return [BindMount(place, place, is_read_only=True) for place in dict.fromkeys((sys.prefix, sys.base_prefix))]


def _find_workspace(directory: str) -> str:
    """Folder that contains <experiment>/<run>; the run folder alone if it is too close to the root."""
    workspace = Path(directory).parent.parent
    return directory if len(workspace.parts) < 2 else str(workspace)


def merge_mounts(ours: Sequence[BindMount], theirs: Sequence[BindMount]) -> tuple[BindMount, ...]:
    """All mounts, without defaults that another mount covers; mounts of the user take precedence.

    Raises:
        UsageError: The engines cannot mount one of them.
    """
    for mount in (*ours, *theirs):
        if any(character < " " for character in mount.source + mount.target):
            raise UsageError(f"{mount.source!r} cannot be mounted: engines do not support line breaks in paths")
    kept: list[BindMount] = list(dict.fromkeys(theirs))
    for mount in sorted(ours, key=lambda each: len(PurePosixPath(each.target).parts)):
        if mount.target == "/":
            raise UsageError("the root folder / cannot be mounted at the same path", "run primus-cli in another folder")
        if not any(_is_covered_by(each, mount) for each in kept):
            kept.append(mount)
    return tuple(kept)


def _is_covered_by(outer: BindMount, mount: BindMount) -> bool:
    """Whether `outer` already provides `mount`, writable if needed; each target can be mounted once."""
    if mount.target == outer.target:
        return True
    target, source = PurePosixPath(mount.target), PurePosixPath(mount.source)
    if not (target.is_relative_to(outer.target) and source.is_relative_to(outer.source)):
        return False
    same = target.relative_to(outer.target) == source.relative_to(outer.source)
    return same and (mount.is_read_only or not outer.is_read_only)


def find_missing_sources(mounts: Iterable[BindMount]) -> list[str]:
    """Sources that do not exist on this host."""
    return [mount.source for mount in mounts if not os.path.exists(mount.source)]

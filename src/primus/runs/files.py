"""Write files atomically, and JSON values to and from them; find the folder of what primus keeps for a user."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from primus.errors import PrimusError, describe_owner
from primus.redaction import redact, redact_tree

T = TypeVar("T")
MOST_INDENTED = 2**20
"""Bytes of JSON that are indented: a longer text is columns of numbers, which nobody reads one to a line."""


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` without its secrets in one step: a reader sees the old file or the new one.

    Raises:
        PrimusError: The file cannot be written, for example because the disk is full.
    """
    write_bytes(path, redact(text).encode("utf-8", "surrogateescape"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step; the caller removes secrets.

    Raises:
        PrimusError: The file cannot be written.
    """
    # In the same folder, since a rename is atomic only within one file system. The process id keeps writers on one host
    # apart.
    temporary = path.with_name(f".{path.name}.tmp.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        owner = f"{describe_owner(path)}: " if isinstance(error, PermissionError) else ""
        hint = "free some space, or choose another folder" if is_full else f"{owner}choose another folder"
        raise PrimusError(f"{path}: cannot be written: {error.strerror}", hint) from None


def sync_to_disk(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, without its secrets."""
    write_bytes(path, f"{to_json(value)}\n".encode("utf-8", "surrogateescape"))


def to_json(value: Any) -> str:
    """`value` as JSON without its secrets, indented if it is not longer than `MOST_INDENTED`."""
    encoded = msgspec.json.encode(redact_tree(msgspec.to_builtins(value, str_keys=True)))
    return (msgspec.json.format(encoded, indent=2) if len(encoded) <= MOST_INDENTED else encoded).decode()


def read_json(path: Path, kind: type[T], hint: str = "") -> T:
    """The JSON of `path` as a `kind`; `hint` says what to do about a damaged file.

    Raises:
        PrimusError: The file is missing, or does not hold a `kind`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise PrimusError(f"{path}: damaged: {error}", hint) from None


UNFIT_NODES_VARIABLE = "PRIMUS_UNFIT_NODES"
"""Folder of the list of unfit nodes; empty for none."""


def find_unfit_nodes_folder(environ: Mapping[str, str]) -> Path | None:
    """Folder of the list of unfit nodes: that of the site or the user's own; None if the user wants none."""
    text = environ.get(UNFIT_NODES_VARIABLE)
    if text is not None:
        return Path(os.path.expanduser(text)) if text else None
    return find_state_folder(environ) / "unfit-nodes"


def find_state_folder(environ: Mapping[str, str]) -> Path:
    """The folder below $XDG_STATE_HOME (XDG Base Directory Specification).

    It may lie in the home folder of another user, as in a container that is started with `--user`: `os.path.isdir` and
    `os.path.isfile` are False then, while methods of Path raise PermissionError.
    """
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(home) / "primus"

"""Plan the files of `--patch`: scripts that run on each node after the hooks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from primus.errors import UsageError
from primus.launch.hooks import discovery
from primus.plan import Action


def plan_patch_files(files: Sequence[str], environ: Mapping[str, str]) -> tuple[Action, ...]:
    """The patch files in their order, as actions of every node.

    Raises:
        UsageError: A file is missing, or is not a script.
    """
    limit_s = discovery.time_limit(environ)
    found = [discovery.read_declaration(_find_script(file), "patch") for file in files]
    return tuple(structs.replace(each, timeout_s=limit_s or each.timeout_s) for each in found)


def _find_script(file: str) -> Path:
    path = Path(os.path.expanduser(file))
    if path.suffix not in (".sh", ".py"):
        raise UsageError(f"--patch {file}: a patch must be a .sh or .py file")
    if not path.is_file():
        raise UsageError(f"--patch {file}: no such file")
    return path

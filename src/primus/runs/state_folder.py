"""Find the folder in which primus keeps what it remembers for a user between commands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def find_state_folder(environ: Mapping[str, str]) -> Path:
    """The folder below $XDG_STATE_HOME (XDG Base Directory Specification).

    It may lie in the home folder of another user, as in a container that is started with `--user`: `os.path.isdir` and
    `os.path.isfile` are False then, while methods of Path raise PermissionError.
    """
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(home) / "primus"

"""Refuse to read what has no end: devices, and files of the kernel such as /proc/kmsg, which block their readers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from primus.errors import UsageError


def check_has_end(path: Path, shown: str) -> None:
    """Check that `path`, `shown` in messages, can be read to its end; a path that does not exist passes.

    Raises:
        UsageError: It is a device, or a file of /proc or /sys.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # the reader has the better message
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise UsageError(f"{shown}: a device, not a file", "give a file")
    # By the resolved name, since /proc/self/fd/3 may be an ordinary file.
    if stat.S_ISREG(mode) and os.path.realpath(path).startswith(("/proc/", "/sys/")):
        raise UsageError(f"{shown}: a file of the kernel, not of data", "give a file")

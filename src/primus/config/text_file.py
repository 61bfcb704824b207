"""Read a configuration file as text, with a message for a file that cannot be one.

Devices, and files of the kernel such as /proc/kmsg, have no end and block their readers: they are refused.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from primus.errors import UsageError, did_you_mean

MOST_BYTES = 16 << 20
"""Largest file that is read; a list of 100,000 token files is smaller."""


def format_path(path: Path) -> str:
    """`path`, relative to the working directory if it is below it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def read_config_text(path: Path, shown: str) -> str:
    """The text of a configuration file, `shown` in messages.

    Raises:
        UsageError: The file cannot be read, is larger than `MOST_BYTES`, or is not UTF-8 text.
    """
    check_has_end(path, shown)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{shown}: larger than {MOST_BYTES >> 20} MiB", "this is not a configuration file")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{shown}: no such file", _suggest_file(path)) from None
    except UnicodeDecodeError as error:
        hint = "it is UTF-16 text; save it as UTF-8" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
        raise UsageError(f"{shown}: not UTF-8 text (byte {error.start})", hint) from None
    except IsADirectoryError:
        files = sorted(each.name for each in path.glob("[!.]*.y*ml"))
        hint = (
            f"give a file in it, such as {os.path.join(shown, files[0])}"
            if files
            else "give a file; it has no YAML file"
        )
        raise UsageError(f"{shown}: a folder, not a file", hint) from None
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL character in its name
        raise UsageError(f"{shown}: cannot be read: {error}") from None


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


def _suggest_file(path: Path) -> str:
    """A hint for a file that does not exist."""
    if re.match(r"[a-z]+:/", str(path)):  # Path has removed the second slash
        return "this is a URL; download the file first"
    slashed = Path(str(path).replace("\\", "/"))
    if slashed != path and slashed.is_file():
        return f"did you mean '{slashed}'?"
    return did_you_mean(path.name, [each.name for each in path.parent.glob("[!.]*.y*ml")])

"""Reads the kernel's files below a root, and records what could not be read."""

from __future__ import annotations

import os
import re
from pathlib import Path

from primus.machine.facts import MachineProblem

MAX_BYTES = 1 << 20
"""Read limit; no file read here is larger."""
LARGEST = 1 << 64
"""No number of the kernel is longer."""


class FileTree:
    """A file system root: `/`, or a recorded tree in tests. Paths are relative to it; it never writes.

    Args:
        root: The root.
        files_only: Whether to read only files even on the running machine: no library, no tool.
    """

    def __init__(self, root: Path = Path("/"), *, files_only: bool = False) -> None:
        self.root = root
        self._prefix = os.path.join(root, "")
        self.files_only = files_only
        self.problems: list[MachineProblem] = []

    @property
    def is_live(self) -> bool:
        """Whether this is the running machine itself."""
        return self.root == Path("/")

    @property
    def may_ask(self) -> bool:
        """Whether libraries and tools may be used for values that the files lack."""
        return self.is_live and not self.files_only

    def read_text(self, path: str) -> str | None:
        """The file's stripped text; None if it does not exist. An existing file that cannot be read is recorded as a
        problem."""
        # A read has no time limit: the files of a hung driver can block in the kernel, where no signal ends the read.
        # Callers that must not block use a thread that they can abandon, as preflight's checks do.
        # The size limit bounds the read of an unexpected file.
        try:
            with open(self._prefix + path, "rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace").strip()
        # A device may disappear between the listing of its folder and the read: this counts as a missing file.
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note_problem(path, f"cannot be read: {error.strerror}")
            return None

    def read_bytes(self, path: str, size: int) -> bytes:
        """The first bytes of a file; none if it cannot be read."""
        try:
            with open(self._prefix + path, "rb") as file:
                return file.read(size)
        except OSError:
            return b""

    def read_number(self, path: str) -> int | None:
        """The file's only number, decimal or `0x` hexadecimal; other text is recorded as a problem."""
        text = self.read_text(path)
        if not text:
            return None
        value = parse_int(text)
        if value is None:
            self.note_problem(path, f"{text[:40]!r} is not a number")
        return value

    def read_properties(self, path: str) -> dict[str, int]:
        """A file of `key value` lines with numbers; other lines are recorded as problems and skipped."""
        found = {}
        for line in (self.read_text(path) or "").splitlines():
            key, _, text = line.strip().partition(" ")
            value = parse_int(text)
            if value is None:
                self.note_problem(path, f"{line.strip()[:60]!r} is not a key with a number")
            else:
                found[key] = value
        return found

    def list_names(self, path: str) -> list[str]:
        """Names in a directory in natural order (mlx5_2 before mlx5_10); empty if it does not exist."""
        try:
            return sorted(os.listdir(self._prefix + path), key=build_sort_key)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.note_problem(path, f"cannot be listed: {error.strerror}")
            return []

    def read_link_target(self, path: str) -> str | None:
        """Last path component of a symbolic link's target: a driver, a device."""
        try:
            return os.path.basename(os.readlink(self._prefix + path))
        except OSError:
            return None

    def note_problem(self, path: str, problem: str) -> None:
        """Record a problem with a file of this tree."""
        self.problems.append(MachineProblem("/" + path.lstrip("/"), problem))


def parse_int(text: str) -> int | None:
    """A decimal or `0x` hexadecimal number; None for anything else, `N/A` included."""
    text = text.strip()
    if re.fullmatch(r"-?\d{1,40}", text):
        return int(text)
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,32}", text) else None


def build_sort_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which numbers inside names count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

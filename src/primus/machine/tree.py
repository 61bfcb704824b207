"""Read the kernel's files under a root, and remember what could not be read."""

from __future__ import annotations

import re
from pathlib import Path

from primus.machine.facts import MachineProblem

MAX_BYTES = 1 << 20
"""More than any file that is read here holds."""
LARGEST = 1 << 64
"""Numbers of the kernel are smaller."""


class FileTree:
    """A file system root: `/`, or a recorded tree in tests. Paths are relative to it; nothing is ever written.

    Args:
        root: The root.
        files_only: Whether even on the running machine nothing but files may be asked: no library, no tool.
    """

    def __init__(self, root: Path = Path("/"), *, files_only: bool = False) -> None:
        self.root = root
        self.files_only = files_only
        self.problems: list[MachineProblem] = []

    @property
    def is_live(self) -> bool:
        """Whether this is the running machine itself."""
        return self.root == Path("/")

    @property
    def may_ask(self) -> bool:
        """Whether libraries and tools may be asked where files are silent."""
        return self.is_live and not self.files_only

    def read_text(self, path: str) -> str | None:
        """The file's text without white space around it; None where there is none. One that is there but cannot be
        read is a problem."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note_problem(path, f"cannot be read: {error.strerror}")
            return None

    def read_number(self, path: str) -> int | None:
        """The file's only number, decimal or `0x` hexadecimal; text that is none is a problem."""
        text = self.read_text(path)
        if not text:
            return None
        value = parse_int(text)
        if value is None:
            self.note_problem(path, f"{text[:40]!r} is not a number")
        return value

    def read_properties(self, path: str) -> dict[str, int]:
        """A file of `key value` lines with numbers; lines that are otherwise are problems and left out."""
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
        """Names in a folder, sorted as people count: mlx5_2 before mlx5_10; empty where there is no such folder."""
        try:
            return sorted((entry.name for entry in (self.root / path).iterdir()), key=build_sort_key)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.note_problem(path, f"cannot be listed: {error.strerror}")
            return []

    def read_link_target(self, path: str) -> str | None:
        """Last name of what a symbolic link points to: a driver, a device."""
        try:
            return (self.root / path).readlink().name
        except OSError:
            return None

    def note_problem(self, path: str, problem: str) -> None:
        """Remember a problem with a file of this tree."""
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

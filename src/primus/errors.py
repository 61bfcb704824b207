"""Errors that a user can act on, and their exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNFIT = 3
EXIT_TIMED_OUT = 124
EXIT_INTERRUPTED = 130


class PrimusError(Exception):
    """Something went wrong that one message can explain; ends the command with `exit_code`.

    PrimusError (1)
    +-- UsageError (2)     the command line or the configuration is wrong
    +-- UnfitError (3)     this machine cannot do what was asked
    +-- FinalError (1)     not retryable: a restart would fail in the same way

    Args:
        problem: What is wrong and where, e.g. ``f.yaml:12: unknown key 'lrr'``.
        hint: What to do about it; may be empty.
    """

    exit_code = EXIT_FAILED

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.problem}\n  {self.hint}" if self.hint else self.problem


class UsageError(PrimusError):
    """The command line or the configuration is wrong."""

    exit_code = EXIT_USAGE


class AbsentFileError(UsageError):
    """A file that the user names is not on this machine; another one may have it."""


class UnfitError(PrimusError):
    """This machine or run folder does not meet the requirements of the command."""

    exit_code = EXIT_UNFIT


class FinalError(PrimusError):
    """Not retryable: a restart would fail in the same way, so operator action is needed."""


def escape_controls(text: str) -> str:
    """`text` for a terminal: lines and tabs stay, other characters that are not printable are spelled out."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def format_error_place(error: BaseException) -> str:
    """`file.py:12` where `error` was raised."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    return f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else "unknown"


def is_raised_on_import(error: BaseException) -> bool:
    """Whether `error` was raised while a module of another package was executed."""
    own, frame = os.path.dirname(__file__), error.__traceback__
    while frame:
        code, frame = frame.tb_frame.f_code, frame.tb_next
        if code.co_name == "<module>" and not code.co_filename.startswith((own + os.sep, "<")):
            return True
    return False


MOST_LISTED = 20
"""Maximum number of valid names that a hint lists."""
SIMILAR = 5
"""Number of similar names that a hint lists if there are more valid names."""
LONGEST_COMPARED = 100
"""Number of characters of a word that are compared."""
SHORTEST_PREFIX = 4
"""Minimum length of a prefix that matches a name."""


def find_nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid name that `word` was most likely meant to be, or None.

    Case, `-` and `_` do not matter. A name is near if few letters differ, in proportion to the length of `word`,
    or if `word` is a prefix of that name only.
    """
    names = {_keep_letters(name): name for name in valid}
    wanted = _keep_letters(word)
    if wanted in names:
        return names[wanted]
    limit = _count_allowed_edits(wanted)
    close = [
        (distance, letters)
        for letters in names
        if abs(len(letters) - len(wanted)) <= limit and (distance := edit_distance(wanted, letters, limit)) <= limit
    ]
    if close:
        return names[min(close)[1]]
    longer = [letters for letters in names if len(wanted) >= SHORTEST_PREFIX and letters.startswith(wanted)]
    return names[longer[0]] if len(longer) == 1 else None


def edit_distance(a: str, b: str, limit: int) -> int:
    """Letters to insert, delete, replace or swap with their neighbor (optimal string alignment); above `limit`, more.

    Ends early once no alignment can stay within `limit`.
    """
    before: list[int] = []
    above = list(range(len(b) + 1))
    for row, letter in enumerate(a, start=1):
        current = [row]
        for column, other in enumerate(b, start=1):
            cost = min(above[column] + 1, current[-1] + 1, above[column - 1] + (letter != other))
            if row > 1 and column > 1 and letter == b[column - 2] and a[row - 2] == other:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        if min(current) > limit:
            return limit + 1
        before, above = above, current
    return above[-1]


def _keep_letters(name: str) -> str:
    return name.lower().replace("-", "_").replace("_", "")


def _count_allowed_edits(word: str) -> int:
    """Maximum edit distance: one letter in a short word, about a fifth of a long one."""
    return 0 if len(word) < 2 else 1 if len(word) <= 5 else 2 if len(word) <= 12 else 3


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """A hint for an unknown `word`: the nearest valid name, else all valid names, or similar ones if there are many."""
    valid = sorted(set(valid))
    close = find_nearest(word, valid)
    if close:
        return f"did you mean '{close}'?"
    if len(valid) <= MOST_LISTED:
        return f"valid: {', '.join(valid)}" if valid else ""
    import difflib  # not for what is right

    similar = difflib.get_close_matches(word[:LONGEST_COMPARED], valid, n=SIMILAR, cutoff=0.6)
    if similar:
        return f"similar: {', '.join(similar)} (of {len(valid)})"
    return f"valid: {', '.join(valid[:MOST_LISTED])} and {len(valid) - MOST_LISTED} more"


def find_owner(path: Path) -> str:
    """Name of the user who owns a file, or a number without a name."""
    try:
        return path.owner()
    except (OSError, KeyError):
        return f"user {path.stat().st_uid}" if path.exists() else "another user"


def describe_owner(path: Path) -> str:
    """Whom `path` belongs to, or the innermost existing folder above it: `out/night belongs to bob`."""
    found = next(each for each in (path, *path.parents) if os.path.exists(each))
    return f"{found} belongs to {find_owner(found)}"

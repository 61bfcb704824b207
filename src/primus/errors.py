"""Errors that a user can act on, and the exit codes they end in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
    +-- FinalError (1)     the same would happen again: nobody should restart it

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


class UnfitError(PrimusError):
    """This machine, or this run folder, does not fit what was asked."""

    exit_code = EXIT_UNFIT


class FinalError(PrimusError):
    """The same would happen again: a person has to decide, a restart is no use."""


def place_of(error: BaseException) -> str:
    """`file.py:12` where `error` was raised."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    return f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else "unknown"


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid name that `word` was most likely meant to be, or None."""
    names = {name.lower().replace("-", "_"): name for name in valid}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1, cutoff=0.6)
    return names[close[0]] if close else None


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """A hint for an unknown `word`: the nearest valid name, else all of them."""
    valid = sorted(valid)
    close = nearest(word, valid)
    if close:
        return f"did you mean '{close}'?"
    return f"valid: {', '.join(valid)}" if valid else ""

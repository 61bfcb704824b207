"""Numbered haiku: a dataset that is computed."""

from collections.abc import Iterator


def documents() -> Iterator[str]:
    """1000 texts, the same ones in the same order each time."""
    for number in range(1000):
        yield f"Line {number} of the log\nscrolls by while the loss goes down.\nCheckpoint {number} saved.\n"


def version() -> str:
    """Changes when `documents` does."""
    return "1"

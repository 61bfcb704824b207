"""What was asked, as a value: replay starts here."""

from __future__ import annotations

from msgspec import Struct


class Segment(Struct, frozen=True):
    """A runtime or a task with the words that follow it."""

    name: str
    words: tuple[str, ...] = ()


class Request(Struct, frozen=True, kw_only=True):
    """The request.json of a run."""

    runtimes: tuple[Segment, ...]
    """Outermost first."""
    task: str
    """Name of the task: ``train pretrain``."""
    words: tuple[str, ...] = ()
    """Words after the task's name, secrets masked."""

"""What was asked, as a value: replay starts here."""

from __future__ import annotations

from msgspec import Struct

from primus.secret import mask_words


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
    """Words after the task's name."""


def without_secrets(request: Request) -> Request:
    """`request` as a run folder may hold it."""
    runtimes = tuple(Segment(segment.name, tuple(mask_words(segment.words))) for segment in request.runtimes)
    return Request(runtimes=runtimes, task=request.task, words=tuple(mask_words(request.words)))

"""From the logs of an attempt to its cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from primus.runs.store import Action, Run


class Evidence(Struct, frozen=True, kw_only=True):
    """A line that shows a signature."""

    file: str
    """Relative to the run folder where there is one."""
    line: int
    """Number of the line, from 1."""
    text: str
    """The line without colours and secrets, shortened."""
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    """Seconds since the epoch, where the line says."""


class Cause(Struct, frozen=True, kw_only=True):
    """A signature that was found."""

    signature: str
    """Its name, such as `gpu-out-of-memory`."""
    summary: str
    role: str
    """`root`: can be the first cause; `cascade`: follows another failure; `info`."""
    action: Action
    fix: str
    evidence: Sequence[Evidence] = ()
    """First occurrences, the earliest first."""
    ranks: tuple[int, ...] = ()
    """All ranks whose logs show it."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """What the logs say."""

    causes: tuple[Cause, ...] = ()
    """The likeliest cause first; cascades after roots."""
    first_rank: int | None = None
    first_host: str | None = None
    action: Action = "retry"
    reason: str = ""
    """In one sentence."""
    tail: tuple[str, ...] = ()
    """Last lines of the first failing rank, where no signature is known."""


def of_run(run: Run, attempt: int | None = None) -> Diagnosis:
    """What the logs of an attempt of `run`, the newest one by default, say."""
    return Diagnosis()


def of_logs(paths: Sequence[Path]) -> Diagnosis:
    """What logs say that belong to no run folder, such as a scheduler's or another launcher's."""
    return Diagnosis()

"""The result of a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from primus.runs.store import Action


class Evidence(Struct, frozen=True, kw_only=True):
    """A line that shows a signature."""

    file: str
    """Relative to the run folder, if there is one."""
    line: int
    """Number of the line, from 1."""
    text: str
    """The line without colors and secrets, shortened."""
    rank: int | None = None
    local_rank: int | None = None
    """Rank within its node."""
    host: str | None = None
    time: float | None = None
    """Seconds since the epoch; None if the line has no time."""


class Cause(Struct, frozen=True, kw_only=True):
    """A signature that the logs show."""

    signature: str
    """Its name, such as `gpu-out-of-memory`."""
    summary: str
    role: str
    """`root`: can be the first cause; `symptom`: is the cause if nothing else explains it; `cascade`: follows another
    failure; `info`."""
    action: Action
    fix: str
    evidence: Sequence[Evidence] = ()
    """First occurrences, the earliest first."""
    ranks: tuple[int, ...] = ()
    """All ranks whose logs show it."""
    count: int = 1
    """Lines that show it."""
    survived: bool = False
    """Whether training continued after it."""
    is_proven: bool = False
    """Whether one of the lines shows that a process ended: an exception, or a report of a launcher or the kernel."""
    source: str = ""
    """Where the signature is publicly described."""


class Diagnosis(Struct, frozen=True, kw_only=True):
    """What the logs of an attempt show."""

    causes: tuple[Cause, ...] = ()
    """The likeliest cause first; roots before cascades."""
    first_rank: int | None = None
    first_host: str | None = None
    """Host, or pod."""
    first_local_rank: int | None = None
    """Rank within its node, if the logs do not tell the rank in the job."""
    action: Action = "retry"
    reason: str = ""
    """In one sentence."""
    tail: tuple[str, ...] = ()
    """Last lines of the first failing rank, if no signature matches."""
    tail_file: str = ""
    """File of these lines."""
    notes: tuple[str, ...] = ()
    """Logs that could not be read, or only in part."""
    num_logs: int = 0
    """Logs that were read."""

    @property
    def cause(self) -> Cause | None:
        """The likeliest cause; None if no root is known."""
        first = self.lead
        return first if first and first.role == "root" else None

    @property
    def lead(self) -> Cause | None:
        """What the logs show first: the cause, else a symptom or a consequence of an unknown cause."""
        return next((cause for cause in self.causes[:1] if cause.role != "info" and not cause.survived), None)

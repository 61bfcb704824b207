"""Whether a job goes on after an attempt has ended: a pure decision on the ends of its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from primus.runs.store import Action

NO_RESTART_CODE = 93
"""Exit code by which a scheduler that restarts jobs is told not to (a convention of nvidia-resiliency-ext)."""


class Policy(Struct, frozen=True, kw_only=True):
    """How workers are watched and restarted."""

    max_restarts: int = 0
    """Restarts after failures without progress in between; preemption and time limits do not count."""
    backoff_s: float = 30.0
    """Time before the first restart after a failure; each further one takes twice as long."""
    hang_timeout_s: float = 600.0
    """Time without progress after which workers count as hanging; 0 for never."""


class End(Struct, frozen=True, kw_only=True):
    """How one attempt has ended."""

    attempt: int
    kind: Literal["done", "failed", "hang", "lost node", "preempted", "interrupted"]
    action: Action = "retry"
    hosts: tuple[str, ...] = ()
    """Nodes that are to blame."""
    step: int | None = None
    """Newest checkpoint that the next attempt would begin with."""
    reason: str = ""


class Decision(Struct, frozen=True, kw_only=True):
    """What is done next."""

    action: Literal["finish", "restart", "stop"]
    delay_s: float = 0.0
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt must do without."""
    reason: str = ""


def decide(policy: Policy, ends: Sequence[End], *, can_exclude: bool = False) -> Decision:
    """What follows the last of `ends`, which are in the order of the attempts.

    Args:
        can_exclude: Whether the next attempt may have other nodes.
    """
    raise NotImplementedError

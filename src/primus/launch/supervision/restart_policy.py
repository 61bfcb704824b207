"""Whether a job goes on after an attempt has ended: a pure decision on the ends of its attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from primus.launch.plan import RestartPolicy
from primus.runs.store import Action

NO_RESTART_CODE = 93
"""Exit code by which a scheduler that restarts jobs is told not to (a convention of nvidia-resiliency-ext)."""
MAX_WITHOUT_PROGRESS = 3
"""Failures in a row without a newer checkpoint after which a restart is no use (the limit of nvidia-resiliency-ext)."""
MAX_DOUBLINGS = 6
FAILURES = frozenset(("failed", "hang", "lost node"))
"""Ends that count as failures."""


class AttemptResult(Struct, frozen=True, kw_only=True):
    """How one attempt has ended."""

    attempt: int
    kind: Literal["done", "failed", "hang", "lost node", "preempted", "interrupted"]
    action: Action = "retry"
    hosts: tuple[str, ...] = ()
    """Nodes that are to blame."""
    step: int | None = None
    """Newest checkpoint that the next attempt would begin with."""
    reason: str = ""


class RestartDecision(Struct, frozen=True, kw_only=True):
    """What is done next."""

    action: Literal["finish", "restart", "stop"]
    delay_s: float = 0.0
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt must do without."""
    reason: str = ""
    is_final: bool = False
    """Whether a stop holds for every scheduler: whoever restarts the job will see it fail in the same way."""


def decide_restart(
    policy: RestartPolicy, ends: Sequence[AttemptResult], *, can_exclude: bool = False
) -> RestartDecision:
    """What follows the last of `ends`, which are in the order of the attempts.

    Args:
        policy: What was asked for.
        ends: At least one.
        can_exclude: Whether the next attempt may have other nodes.
    """
    last = ends[-1]
    if last.kind == "done":
        return RestartDecision(action="finish")
    if last.kind == "interrupted":
        return RestartDecision(action="stop", reason="it was told to stop")
    if last.kind == "preempted":
        return RestartDecision(
            action="restart", exclude=_find_bad_hosts(ends) if can_exclude else (), reason="preempted"
        )
    if last.action == "stop":
        return RestartDecision(action="stop", is_final=True, reason="it would fail in the same way again")
    used, barren = count_failures(ends)
    if used > policy.max_restarts:
        return RestartDecision(
            action="stop", is_final=barren >= MAX_WITHOUT_PROGRESS, reason=_format_restarts_used_up(policy.max_restarts)
        )
    if barren >= MAX_WITHOUT_PROGRESS:
        reason = f"no progress: {barren} attempts in a row have left no newer checkpoint"
        return RestartDecision(action="stop", is_final=True, reason=reason)
    recent = [end for end in ends if end.kind in FAILURES][-used:]
    exclude = _find_bad_hosts(ends) if can_exclude else _find_bad_hosts(recent, only_last=True)
    if exclude and not can_exclude:
        return RestartDecision(
            action="stop", reason=f"{', '.join(exclude)} should be left out, and no other node can be had"
        )
    return RestartDecision(
        action="restart",
        delay_s=policy.backoff_s * 2 ** min(used - 1, MAX_DOUBLINGS),
        exclude=exclude,
        reason=f"restart {used} of {policy.max_restarts}",
    )


def count_failures(ends: Sequence[AttemptResult]) -> tuple[int, int]:
    """Number of failures since the newest checkpoint was made, and how many of these made none themselves.

    The failure before which a checkpoint was made is the first of a new count. Preemptions are passed over; what they
    have saved is progress.
    """
    used, barren, saved, known = 0, 0, -1, -1
    for end in ends:
        known = max(known, -1 if end.step is None else end.step)
        if end.kind not in FAILURES:
            continue
        used, barren = (1, 0) if known > saved else (used + 1, barren + 1)
        saved = known
    return used, barren


def _find_bad_hosts(ends: Sequence[AttemptResult], *, only_last: bool = False) -> tuple[str, ...]:
    """Nodes that were lost, were to be left out, or hung twice; with `only_last` those that the last end adds."""
    hangs = Counter(host for end in ends if end.kind == "hang" for host in end.hosts)
    blamed: dict[str, None] = {}
    for end in ends[-1:] if only_last else ends:
        is_lost = end.kind == "lost node" or (end.kind in FAILURES and end.action == "exclude")
        blamed |= dict.fromkeys(host for host in end.hosts if is_lost or (end.kind == "hang" and hangs[host] > 1))
    return tuple(blamed)


def _format_restarts_used_up(max_restarts: int) -> str:
    return f"all {max_restarts} restarts are used up" if max_restarts else "no restarts were asked for (--max-restarts)"

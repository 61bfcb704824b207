"""Decide whether a job is restarted after an attempt, by a pure function of the results of its attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from primus.plan import RestartPolicy
from primus.runs.store import Action

NO_RESTART_CODE = 93
"""Exit code that tells a scheduler not to restart the job (a convention of nvidia-resiliency-ext)."""
MAX_WITHOUT_PROGRESS = 3
"""Failures in a row without a newer checkpoint after which the job stops (the limit of nvidia-resiliency-ext)."""
FAILURES = frozenset(("failed", "hang", "lost node"))
"""Kinds of results that count as failures."""


class AttemptResult(Struct, frozen=True, kw_only=True):
    """Result of one attempt."""

    attempt: int
    kind: Literal["done", "failed", "hang", "lost node", "preempted", "interrupted"]
    action: Action = "retry"
    hosts: tuple[str, ...] = ()
    """Nodes to which the failure is attributed."""
    step: int | None = None
    """Newest checkpoint, from which the next attempt would resume."""
    reason: str = ""


class RestartDecision(Struct, frozen=True, kw_only=True):
    """Decision after an attempt."""

    action: Literal["finish", "restart", "stop"]
    delay_s: float = 0.0
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt must not use."""
    reason: str = ""
    is_final: bool = False
    """Whether no scheduler should restart the job either, since it would fail in the same way."""


def decide_restart(
    policy: RestartPolicy, results: Sequence[AttemptResult], *, can_exclude: bool = False
) -> RestartDecision:
    """Decide after the last of `results`, which are in the order of the attempts.

    Args:
        policy: Settings of the user.
        results: At least one.
        can_exclude: Whether the next attempt may get other nodes.
    """
    last = results[-1]
    if last.kind == "done":
        return RestartDecision(action="finish")
    if last.kind == "interrupted":
        return RestartDecision(action="stop", reason="a signal asked it to stop")
    if last.kind == "preempted":
        return RestartDecision(
            action="restart", exclude=_find_bad_hosts(results) if can_exclude else (), reason="preempted"
        )
    # Before the number of restarts: this also applies if restarts are left.
    if last.action == "stop":
        return RestartDecision(action="stop", is_final=True, reason="it would fail in the same way again")
    used, without_progress = count_failures(results)
    if used > policy.max_restarts:
        is_final = without_progress >= MAX_WITHOUT_PROGRESS
        return RestartDecision(action="stop", is_final=is_final, reason=_format_restarts_used(policy.max_restarts))
    if without_progress >= MAX_WITHOUT_PROGRESS:
        reason = f"no progress: {without_progress} attempts in a row wrote no newer checkpoint"
        return RestartDecision(action="stop", is_final=True, reason=reason)
    # Without other nodes, a node that was bad before the last checkpoint is tolerated: the job made progress with it.
    recent = [result for result in results if result.kind in FAILURES][-used:]
    exclude = _find_bad_hosts(results) if can_exclude else _find_bad_hosts(recent, only_last=True)
    if exclude and not can_exclude:
        reason = f"{', '.join(exclude)} should be excluded, and no other node is available"
        return RestartDecision(action="stop", reason=reason)
    return RestartDecision(
        action="restart",
        delay_s=policy.backoff_s * 2 ** (used - 1),
        exclude=exclude,
        reason=f"restart {used} of {policy.max_restarts}",
    )


def count_failures(results: Sequence[AttemptResult]) -> tuple[int, int]:
    """Number of failures since the newest checkpoint, and how many of these wrote none themselves.

    A failure after a newer checkpoint is the first of a new count. Preemptions are skipped, but a checkpoint that a
    preempted attempt wrote is progress.
    """
    # `counted_from` is the newest checkpoint at the last failure, `newest` that of all attempts so far.
    used, without_progress, counted_from, newest = 0, 0, -1, -1
    for result in results:
        newest = max(newest, -1 if result.step is None else result.step)
        if result.kind not in FAILURES:
            continue
        used, without_progress = (1, 0) if newest > counted_from else (used + 1, without_progress + 1)
        counted_from = newest
    return used, without_progress


def _find_bad_hosts(results: Sequence[AttemptResult], *, only_last: bool = False) -> tuple[str, ...]:
    """Nodes that were lost, should be excluded, or hung twice; with `only_last` those that the last result adds."""
    # One hang may be any rank's fault; a second one on the same node is not a coincidence.
    hangs = Counter(host for result in results if result.kind == "hang" for host in result.hosts)
    bad: dict[str, None] = {}
    for result in results[-1:] if only_last else results:
        is_bad = result.kind == "lost node" or (result.kind in FAILURES and result.action == "exclude")
        bad |= dict.fromkeys(host for host in result.hosts if is_bad or (result.kind == "hang" and hangs[host] > 1))
    return tuple(bad)


def _format_restarts_used(max_restarts: int) -> str:
    if not max_restarts:
        return "restarts are off; set --max-restarts to enable them"
    return f"all {max_restarts} restarts are used" if max_restarts > 1 else "the only restart is used"

"""How an attempt has ended, from how it ended on each node."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from primus.errors import EXIT_FAILED
from primus.launch.supervision.heartbeats import sort_failures
from primus.launch.supervision.restart_policy import AttemptResult, RestartDecision
from primus.runs.store import RankFailure, RunOutcome


class NodeResult(Struct, frozen=True, kw_only=True):
    """How an attempt has ended on one node."""

    host: str
    returncode: int
    """Of what was started there; it says little."""
    failures: tuple[RankFailure, ...] = ()
    """What its ranks have failed of."""
    interruption: str | None = None
    """Signal for which its ranks say they have stopped."""


class AttemptDecision(Struct, frozen=True, kw_only=True):
    """What node 0 decides after an attempt, as it sends it to the other nodes."""

    start: int | None = None
    """The attempt that all nodes start now; without it they wait, or stop."""
    restart: RestartDecision | None = None
    outcome: RunOutcome | None = None
    """How the job ends, or the attempt has ended."""


def combine_node_results(
    number: int,
    ended: Sequence[NodeResult],
    *,
    heard: int | None,
    hang: RankFailure | None,
    lost: Mapping[str, str],
    saved: int | None,
) -> tuple[RunOutcome, AttemptResult]:
    """The outcome of attempt `number` for people, and for the decision about a restart.

    Args:
        number: The attempt.
        ended: How it ended on the nodes that said so.
        heard: First signal that asked the job to stop.
        hang: The rank that hangs.
        lost: Why a node is lost, by its host.
        saved: Step of the newest checkpoint.
    """
    last_save = "nothing was saved" if saved is None else f"saved at step {saved}"
    failures = sort_failures(failure for each in ended for failure in each.failures)
    stopped = next((each.interruption for each in ended if each.interruption), None)
    is_clean = not failures and not any(each.returncode for each in ended)
    if heard is not None or (stopped and is_clean and not lost and not hang):
        name = signal.Signals(heard).name if heard is not None else str(stopped)
        code = 128 + getattr(signal, name, signal.SIGTERM)  # a signal to another rank has no name here
        who = "" if heard is not None else " to the workers"
        outcome = RunOutcome(state="interrupted", exit_code=code, reason=f"{name}{who}; {last_save}")
        kind = "preempted" if name == "SIGUSR1" else "interrupted"
        return outcome, AttemptResult(attempt=number, kind=kind, step=saved, reason=outcome.reason)  # type: ignore[arg-type]
    if lost:
        reason = "; ".join(f"{host} was lost: {why}" for host, why in lost.items())
        outcome = RunOutcome(state="failed", exit_code=EXIT_FAILED, reason=reason)
        return outcome, AttemptResult(attempt=number, kind="lost node", hosts=tuple(lost), step=saved, reason=reason)
    if hang is None and is_clean:
        return RunOutcome(state="done", exit_code=0), AttemptResult(attempt=number, kind="done", step=saved)
    first = hang or (failures[0] if failures else _make_unexplained_failure(ended))
    outcome = RunOutcome(state="failed", exit_code=first.exit_code, reason=first.problem, first_failure=first)
    return outcome, AttemptResult(
        attempt=number,
        kind="hang" if hang else "failed",
        action=first.action,
        hosts=(first.host,),
        step=saved,
        reason=first.problem,
    )


def _make_unexplained_failure(ended: Sequence[NodeResult]) -> RankFailure:
    """What can be said where no node knows why."""
    bad = next((each for each in ended if each.returncode), ended[0])
    problem = f"the workers on {bad.host} were ended, and nobody said why"
    return RankFailure(rank=0, host=bad.host, time=time.time(), problem=problem, log="logs/launch.log")

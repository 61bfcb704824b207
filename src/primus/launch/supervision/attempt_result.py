"""Combine the results of all nodes into the result of an attempt."""

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
    """Result of an attempt on one node."""

    host: str
    returncode: int
    """Exit code of the program that was started there: not 0 if a rank failed."""
    failures: tuple[RankFailure, ...] = ()
    """Failures of its ranks."""
    interruption: str | None = None
    """Name of the signal for which its ranks stopped, as they report it."""


class AttemptDecision(Struct, frozen=True, kw_only=True):
    """What node 0 decides after an attempt, as it sends it to the other nodes.

    A restart takes two decisions: the first has `restart` and `outcome`, the second, after the back-off, `start`.
    """

    start: int | None = None
    """The attempt that all nodes start now."""
    restart: RestartDecision | None = None
    outcome: RunOutcome | None = None
    """Outcome of the attempt, and of the job if it is not restarted."""


def combine_node_results(
    number: int,
    results: Sequence[NodeResult],
    *,
    received_signal: int | None,
    hang: RankFailure | None,
    lost: Mapping[str, str],
    saved: int | None,
) -> tuple[RunOutcome, AttemptResult]:
    """The outcome of attempt `number` for the user, and its result for the decision about a restart.

    The first of these that applies: a signal, a lost node, success, a hang, the first failure.

    Args:
        number: The attempt.
        results: How it ended on the nodes that reported.
        received_signal: First signal that asked the job to stop.
        hang: The rank that hangs.
        lost: Why a node is lost, by its host.
        saved: Step of the newest checkpoint.
    """
    failures = sort_failures(failure for each in results for failure in each.failures)
    is_clean = not failures and not any(each.returncode for each in results)
    interruption = next((each.interruption for each in results if each.interruption), None)
    # A signal may be sent to the ranks only: it counts as an interruption if nothing else failed.
    if received_signal is not None or (interruption and is_clean and not lost and not hang):
        return _make_interruption(number, received_signal, interruption, saved)
    # Before failures: the ranks of the other nodes fail because a node is lost.
    if lost:
        reason = "; ".join(f"{host} was lost: {why}" for host, why in lost.items())
        outcome = RunOutcome(state="failed", exit_code=EXIT_FAILED, reason=reason)
        return outcome, AttemptResult(attempt=number, kind="lost node", hosts=tuple(lost), step=saved, reason=reason)
    if hang is None and is_clean:
        return RunOutcome(state="done", exit_code=0), AttemptResult(attempt=number, kind="done", step=saved)
    first = hang or (failures[0] if failures else _make_unexplained_failure(results))
    outcome = RunOutcome(state="failed", exit_code=first.exit_code, reason=first.problem, first_failure=first)
    return outcome, AttemptResult(
        attempt=number,
        kind="hang" if hang else "failed",
        action=first.action,
        hosts=(first.host,),
        step=saved,
        reason=first.problem,
    )


def _make_interruption(
    number: int, received_signal: int | None, interruption: str | None, saved: int | None
) -> tuple[RunOutcome, AttemptResult]:
    name = signal.Signals(received_signal).name if received_signal is not None else str(interruption)
    code = 128 + getattr(signal, name, signal.SIGTERM)  # the host of the rank may know signals that this one does not
    recipient = "" if received_signal is not None else " to the workers"
    last_save = "nothing was saved" if saved is None else f"saved at step {saved}"
    outcome = RunOutcome(state="interrupted", exit_code=code, reason=f"{name}{recipient}; {last_save}")
    kind = "preempted" if name == "SIGUSR1" else "interrupted"
    return outcome, AttemptResult(attempt=number, kind=kind, step=saved, reason=outcome.reason)  # type: ignore[arg-type]


def _make_unexplained_failure(results: Sequence[NodeResult]) -> RankFailure:
    """The failure of an attempt whose processes failed without any error."""
    failed = next((each for each in results if each.returncode), results[0])
    problem = f"workers on {failed.host} exited without reporting an error"
    return RankFailure(rank=0, host=failed.host, time=time.time(), problem=problem, log="logs/launch.log")

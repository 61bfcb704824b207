"""Find the cause of a failed attempt in its logs, when it has failed: which rank was first, why, and what to do."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from primus.diagnosis import diagnose
from primus.errors import EXIT_UNFIT, EXIT_USAGE, PrimusError
from primus.launch.supervision import heartbeats
from primus.launch.supervision.restart_policy import AttemptResult
from primus.messages import Say
from primus.runs.store import RankFailure, Run, RunOutcome

NUM_EVIDENCE = 3
"""Log lines that are printed for a cause."""


def diagnose_failure(
    run: Run, outcome: RunOutcome, result: AttemptResult, say: Say
) -> tuple[RunOutcome, AttemptResult, diagnose.Diagnosis]:
    """Add the findings of the logs to a failure: the first failing rank, the cause, and the action. Gives them, too."""
    diagnosis = _find_causes(run, result.attempt, say)
    first = outcome.first_failure
    if first is not None:
        # A hang keeps the rank that the inspection blames: logs of hanging ranks show time-outs of all others.
        if result.kind == "failed":
            first = _blame_rank(run.attempt_folder(result.attempt), first, diagnosis)
        first = _add_cause(first, diagnosis)
        outcome = structs.replace(outcome, exit_code=first.exit_code, reason=first.problem, first_failure=first)
        if result.kind == "failed":
            result = structs.replace(result, action=first.action, hosts=(first.host,), reason=first.problem)
    return outcome, result, diagnosis


def _find_causes(run: Run, number: int, say: Say) -> diagnose.Diagnosis:
    """Find causes in the logs of attempt `number`; prints the likeliest one."""
    try:
        found = diagnose.diagnose_run(run, number)
    except (PrimusError, OSError) as error:
        say(f"the logs cannot be diagnosed: {error}")
        return diagnose.Diagnosis()
    cause = found.cause
    if cause is not None:
        say(f"cause: {cause.summary} ({cause.signature})")
        for evidence in cause.evidence[:NUM_EVIDENCE]:
            if not evidence.file.endswith(diagnose.ERROR_SUFFIX):  # a rank's own error is printed as the run's reason
                say(f"  {evidence.file}:{evidence.line}: {evidence.text}")
    return found


def _add_cause(first: RankFailure, diagnosis: diagnose.Diagnosis) -> RankFailure:
    """The first failure with its cause, fix and action; the job stops if the rank itself requests it."""
    if first.exit_code in (EXIT_USAGE, EXIT_UNFIT):
        first = structs.replace(first, action="stop")
    if diagnosis.cause is None:
        return first
    action = "stop" if first.action == "stop" else diagnosis.action
    hint = first.hint or diagnosis.cause.fix
    return structs.replace(first, action=action, signature=diagnosis.cause.signature, hint=hint)


def _blame_rank(folder: Path, first: RankFailure, diagnosis: diagnose.Diagnosis) -> RankFailure:
    """The failure of the first failing rank according to the logs; it may have been reported after others."""
    if diagnosis.cause is None or diagnosis.first_rank is None or diagnosis.first_rank == first.rank:
        return first
    own = next(iter(heartbeats.read_failures(folder, [diagnosis.first_rank])), None)
    return own or structs.replace(first, rank=diagnosis.first_rank, host=diagnosis.first_host or first.host)

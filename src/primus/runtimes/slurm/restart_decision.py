"""What follows a step of a batch job: the end, another step, the queue again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from primus.errors import EXIT_FAILED
from primus.launch.supervision import attempt_history
from primus.launch.supervision.restart_policy import AttemptResult, RestartDecision, RestartPolicy, decide_restart
from primus.runs import events
from primus.runs.events import EventLog
from primus.runs.store import Run, RunOutcome
from primus.runtimes.slurm import queries

KIND, SUBMITTED = "step_ended", "submitted"


class SlurmStepResult(Struct, frozen=True, kw_only=True):
    """A step that has ended."""

    exit_code: int
    num_nodes: int
    """Nodes that each step takes."""
    is_warned: bool = False
    """Whether the end of the job was announced."""
    excluded: tuple[str, ...] = ()
    """Nodes that were left out already."""
    can_requeue: bool = False
    policy: RestartPolicy


def decide_after_step(run: Run, step: SlurmStepResult, environ: Mapping[str, str]) -> tuple[str, str]:
    """The line that the batch script reads, and why, for people.

    The line is one of ``finish``, ``restart SECONDS NODES``, ``requeue`` and ``stop CODE``. How the attempt ended is
    noted, where its nodes could not.
    """
    nodes = queries.expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))
    has_spares = len(nodes) - len(step.excluded) > step.num_nodes
    end = _read_attempt_end(run, step, nodes, has_spares=has_spares)
    _record_step_end(run, step, end)
    if end.kind == "done" or (step.exit_code == 0 and end.kind != "preempted"):
        return "finish", "done"
    left = [node for node in nodes if node not in step.excluded and node not in _match_node_names(end.hosts, nodes)]
    has_spares = has_spares and len(left) >= step.num_nodes
    is_lost = end.kind == "lost node"
    past = attempt_history.read_attempt_results(run) or [end]
    decision = decide_restart(step.policy, past, can_exclude=has_spares or (is_lost and step.can_requeue))
    return _format_decision(decision, end, structs.replace(step, exit_code=_exit_code(run, step)), nodes, has_spares)


def _exit_code(run: Run, step: SlurmStepResult) -> int:
    """That of the run, which its nodes have recorded: srun gives the highest of its tasks, which it may have killed."""
    return run.read_metadata().outcome.exit_code or step.exit_code or EXIT_FAILED


def _format_decision(
    decision: RestartDecision, end: AttemptResult, step: SlurmStepResult, nodes: Sequence[str], has_spares: bool
) -> tuple[str, str]:
    code = step.exit_code
    if end.kind == "preempted":
        if step.can_requeue:
            return "requeue", decision.reason
        return f"stop {code}", f"{decision.reason}; --requeue would queue it again"
    if end.kind == "lost node" and not has_spares and step.can_requeue and not decision.is_final:
        return "requeue", end.reason
    if decision.action != "restart":
        return f"stop {code}", decision.reason
    excluded = dict.fromkeys((*step.excluded, *_match_node_names(decision.exclude, nodes)))
    if excluded and len(nodes) - len(excluded) < step.num_nodes:
        return f"stop {code}", "no spare node is left"
    return f"restart {decision.delay_s:g} {','.join(excluded)}".rstrip(), decision.reason


def _read_attempt_end(run: Run, step: SlurmStepResult, nodes: Sequence[str], *, has_spares: bool) -> AttemptResult:
    """How the attempt ended: as its nodes say, unless one of them could not."""
    metadata = run.read_metadata()
    past = attempt_history.read_attempt_results(run)
    is_begun = metadata.attempts > _count_begun_attempts(run)
    number = metadata.attempts - 1 if is_begun else metadata.attempts
    noted = next((end for end in past if end.attempt == number and is_begun), None)
    if noted and noted.kind in ("done", "interrupted", "preempted"):
        return noted
    if step.is_warned:
        reason = "the end of the job was announced"
        return structs.replace(
            noted or AttemptResult(attempt=number, kind="preempted"), kind="preempted", reason=reason
        )
    if step.exit_code == 0:
        return noted or AttemptResult(attempt=number, kind="done")
    if noted and noted.kind == "lost node" and has_spares:
        return noted
    newest = attempt_history.find_newest_checkpoint(run)
    lost = _find_lost_nodes(step, nodes)
    if lost:
        reason = f"lost {', '.join(lost)}"
        return AttemptResult(attempt=number, kind="lost node", action="exclude", hosts=lost, step=newest, reason=reason)
    reason = f"srun ended with exit code {step.exit_code}"
    if not is_begun:  # nor will it the next time
        told = run.read_metadata().outcome.reason if _is_end_recorded(run) else ""  # such as of a hook
        reason = told or f"{reason}, and no attempt had begun"
        return AttemptResult(attempt=number, kind="failed", action="stop", step=newest, reason=reason)
    if noted and noted.kind == "lost node":  # its launcher was, and may be started there again
        return structs.replace(noted, kind="failed", hosts=(), reason=f"{noted.reason}; the node answers")
    return noted or AttemptResult(attempt=number, kind="failed", step=newest, reason=reason)


def _is_end_recorded(run: Run) -> bool:
    """Whether a node has recorded how the run has ended since the job, or the step before, began."""
    metadata = run.read_metadata()
    since = [event["time"] for event in events.read_events(run.events) if event["kind"] in (KIND, SUBMITTED)]
    is_new = metadata.ended is not None and metadata.ended >= max(since, default=0.0)
    is_begun = metadata.attempts > _count_begun_attempts(run)
    return metadata.outcome.state not in ("planned", "running") and (is_begun or is_new)


def _count_begun_attempts(run: Run) -> int:
    """Attempts that had begun when the step before ended, in this job or one before it."""
    counts = [event.get("attempts") for event in events.read_events(run.events) if event["kind"] == KIND]
    return next((count for count in reversed(counts) if isinstance(count, int)), 0)


def _find_lost_nodes(step: SlurmStepResult, nodes: Sequence[str]) -> tuple[str, ...]:
    """Nodes that are gone: Slurm says so, or no step starts there."""
    used = [node for node in nodes if node not in step.excluded]
    if len(used) < 2:
        return ()
    known = queries.find_down_nodes(used)
    asked = [node for node in used if node not in known]
    answering = queries.find_answering_nodes(asked) if asked else set()
    silent = [node for node in asked if node not in answering]
    return tuple(node for node in used if node in known or (node in silent and answering))


def _match_node_names(hosts: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Slurm's names of `hosts`, which may be known with their domain."""
    short = {host.partition(".")[0].lower() for host in hosts}
    return [node for node in nodes if node.partition(".")[0].lower() in short]


def _record_step_end(run: Run, step: SlurmStepResult, end: AttemptResult) -> None:
    """Record how the step ended; and the run, where no node has."""
    metadata, is_told = run.read_metadata(), _is_end_recorded(run)
    if end not in attempt_history.read_attempt_results(run):
        attempt_history.record_attempt_result(run, end)
    if end.kind == "done" and metadata.outcome.state == "planned":
        run.update_metadata(ended=time.time(), outcome=RunOutcome(state="done", exit_code=0))
    elif end.kind != "done" and not is_told:
        state = RunOutcome(
            state="interrupted" if end.kind == "preempted" else "failed", exit_code=step.exit_code, reason=end.reason
        )
        run.update_metadata(ended=time.time(), outcome=state)
    log = EventLog(run.events)  # after the record, whose time says that it is of this step
    log.append(KIND, exit_code=step.exit_code, attempts=metadata.attempts, end=end.kind, hosts=end.hosts)
    log.close()

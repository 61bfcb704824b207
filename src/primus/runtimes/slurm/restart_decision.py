"""Decide after a step of a batch job whether to stop, restart or requeue.

The result of the step comes from three sources, in this order: the records of its nodes in the run folder, the warning
signal to the batch script, and the nodes that Slurm lists as down or on which no step starts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, structs

from primus.errors import EXIT_FAILED, EXIT_OK
from primus.launch.supervision import attempt_history
from primus.launch.supervision.restart_policy import AttemptResult, RestartDecision, decide_restart
from primus.plan import RestartPolicy
from primus.runs import events
from primus.runs.events import EventLog
from primus.runs.store import Run, RunOutcome
from primus.runtimes.slurm import queries
from primus.runtimes.slurm.step_errors import choose_exit_code

KIND, SUBMITTED = "step_ended", "submitted"


class SlurmStepResult(Struct, frozen=True, kw_only=True):
    """A step that has ended."""

    exit_code: int
    """Exit code of srun."""
    error: str = ""
    """The first error that Slurm has printed into the log of the job."""
    num_nodes: int
    """Nodes of each step."""
    is_warned: bool = False
    """Whether Slurm has sent the warning signal: the time limit or a preemption is near."""
    excluded: tuple[str, ...] = ()
    """Nodes that the step did not use."""
    has_workers: bool = False
    """Whether the launchers record the run, so that a step without a record has not run it."""
    can_requeue: bool = False
    has_next_link: bool = False
    """Whether a further job of its chain continues the run."""
    policy: RestartPolicy


class StepDecision(Struct, frozen=True, kw_only=True):
    """Decision after a step."""

    action: Literal["finish", "restart", "requeue", "continue", "stop"]
    """`continue`: this job ends, and the next one of its chain resumes the run."""
    reason: str
    exit_code: int = EXIT_OK
    """Exit code of a job that stops."""
    delay_s: float = 0.0
    """Time before a restart."""
    exclude: tuple[str, ...] = ()
    """Nodes that a restart does not use."""


def decide_after_step(run: Run, step: SlurmStepResult, environ: Mapping[str, str]) -> StepDecision:
    """Record how the attempt ended, where its nodes could not, and decide what follows.

    Args:
        run: The job's run.
        step: The step that has ended.
        environ: Variables of the batch script.
    """
    nodes = queries.expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))
    has_spares = len(nodes) - len(step.excluded) > step.num_nodes
    end = _find_attempt_result(run, step, nodes, environ, has_spares=has_spares)
    _record_step_end(run, step, end)
    if end.kind == "done" or (step.exit_code == 0 and end.kind != "preempted" and not step.has_workers):
        return StepDecision(action="finish", reason="done")
    left = [node for node in nodes if node not in step.excluded and node not in _match_node_names(end.hosts, nodes)]
    has_spares = has_spares and len(left) >= step.num_nodes
    is_lost, is_replaced = end.kind == "lost node", step.can_requeue or step.has_next_link
    past = attempt_history.read_attempt_results(run) or [end]
    restart = decide_restart(step.policy, past, can_exclude=has_spares or (is_lost and is_replaced))
    return _choose_action(restart, end, step, _find_run_exit_code(run, step), nodes, has_spares=has_spares)


def _find_run_exit_code(run: Run, step: SlurmStepResult) -> int:
    """Exit code of the run, as its nodes have recorded it; srun gives the highest of its tasks, even of killed ones."""
    return run.read_metadata().outcome.exit_code or step.exit_code or EXIT_FAILED


def _choose_action(
    restart: RestartDecision,
    end: AttemptResult,
    step: SlurmStepResult,
    code: int,
    nodes: Sequence[str],
    *,
    has_spares: bool,
) -> StepDecision:
    """The decision for any scheduler, as what this job can do: Slurm replaces nodes only in the queue."""
    is_replaceable = end.kind == "lost node" and not has_spares and not restart.is_final
    if step.has_next_link and (end.kind == "preempted" or is_replaceable):
        return StepDecision(action="continue", reason=f"{end.reason}; the next job of the chain resumes the run")
    if end.kind == "preempted":
        if step.can_requeue:
            return StepDecision(action="requeue", reason=restart.reason)
        reason = f"{restart.reason}; submit with --requeue to have such a job queued again"
        return StepDecision(action="stop", exit_code=code, reason=reason)
    if is_replaceable and step.can_requeue:
        return StepDecision(action="requeue", reason=end.reason)
    if restart.action != "restart":
        return StepDecision(action="stop", exit_code=code, reason=restart.reason)
    excluded = tuple(dict.fromkeys((*step.excluded, *_match_node_names(restart.exclude, nodes))))
    if excluded and len(nodes) - len(excluded) < step.num_nodes:
        return StepDecision(action="stop", exit_code=code, reason="no spare node is left")
    return StepDecision(action="restart", delay_s=restart.delay_s, exclude=excluded, reason=restart.reason)


def _find_attempt_result(
    run: Run, step: SlurmStepResult, nodes: Sequence[str], environ: Mapping[str, str], *, has_spares: bool
) -> AttemptResult:
    """Result of the attempt: the record of its nodes, unless a node could not write one."""
    metadata = run.read_metadata()
    past = attempt_history.read_attempt_results(run)
    has_started = metadata.attempts > _count_started_attempts(run)
    number = metadata.attempts - 1 if has_started else metadata.attempts
    recorded = next((end for end in past if end.attempt == number and has_started), None)
    # The nodes know best. The following sources are used only if they could not record a result.
    if recorded and recorded.kind in ("done", "interrupted", "preempted"):
        return recorded
    # After a warning Slurm kills the remaining tasks, so that their exit codes say nothing about the cause.
    if step.is_warned:
        preempted = recorded or AttemptResult(attempt=number, kind="preempted")
        return structs.replace(preempted, kind="preempted", reason="time limit or preemption signal received")
    if step.exit_code == 0 and not recorded and step.has_workers:
        reason = "srun exited with code 0, but the launchers recorded nothing: the nodes ran another program"
        return AttemptResult(attempt=number, kind="failed", action="stop", reason=reason)
    if step.exit_code == 0:
        return recorded or AttemptResult(attempt=number, kind="done")
    # With spare nodes the lost node is replaced at once. Without, Slurm is asked first whether it is really lost.
    if recorded and recorded.kind == "lost node" and has_spares:
        return recorded
    newest = attempt_history.find_newest_checkpoint(run)
    lost = _find_lost_nodes(step, nodes, environ)
    if lost:
        reason = f"lost {', '.join(lost)}"
        return AttemptResult(attempt=number, kind="lost node", action="exclude", hosts=lost, step=newest, reason=reason)
    reason = f"srun exited with code {step.exit_code}"
    if not has_started:  # a restart would fail in the same way
        cause = run.read_metadata().outcome.reason if _is_end_recorded(run) else ""  # such as a failed hook
        reason = cause or f"{reason} before an attempt started" + (f": {step.error}" if step.error else "")
        return AttemptResult(attempt=number, kind="failed", action="stop", step=newest, reason=reason)
    if recorded and recorded.kind == "lost node":  # only its launcher was lost; a restart may use the node
        return structs.replace(recorded, kind="failed", hosts=(), reason=f"{recorded.reason}; the node responds")
    return recorded or AttemptResult(attempt=number, kind="failed", step=newest, reason=reason)


def _is_end_recorded(run: Run) -> bool:
    """Whether a node has recorded the end of the run since the job, or its previous step, started."""
    metadata = run.read_metadata()
    since = [event["time"] for event in events.read_events(run.events) if event["kind"] in (KIND, SUBMITTED)]
    is_new = metadata.ended is not None and metadata.ended >= max(since, default=0.0)
    has_started = metadata.attempts > _count_started_attempts(run)
    return metadata.outcome.state not in ("planned", "running") and (has_started or is_new)


def _count_started_attempts(run: Run) -> int:
    """Attempts that had started when the previous step ended, in this job or an earlier one."""
    counts = [event.get("attempts") for event in events.read_events(run.events) if event["kind"] == KIND]
    return next((count for count in reversed(counts) if isinstance(count, int)), 0)


def _find_lost_nodes(step: SlurmStepResult, nodes: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes that Slurm lists as down, or on which no step starts while one starts on others."""
    used = [node for node in nodes if node not in step.excluded]
    # A single node runs this batch script, so it responds.
    if len(used) < 2:
        return ()
    down = queries.find_down_nodes(used, environ)
    asked = [node for node in used if node not in down]
    responding = queries.find_responding_nodes(asked, environ) if asked else set()
    silent = [node for node in asked if node not in responding]
    # Silence counts only if another node responds: otherwise the controller or srun itself is the problem.
    return tuple(node for node in used if node in down or (node in silent and responding))


def _match_node_names(hosts: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Slurm's names of `hosts`, which may carry a domain."""
    short = {host.partition(".")[0].lower() for host in hosts}
    return [node for node in nodes if node.partition(".")[0].lower() in short]


def _record_step_end(run: Run, step: SlurmStepResult, end: AttemptResult) -> None:
    """Record the end of the step, and that of the run if no node has."""
    metadata, is_recorded = run.read_metadata(), _is_end_recorded(run)
    if end not in attempt_history.read_attempt_results(run):
        attempt_history.record_attempt_result(run, end)
    if end.kind == "done" and metadata.outcome.state == "planned":
        run.update_metadata(ended=time.time(), outcome=RunOutcome(state="done", exit_code=0))
    elif end.kind != "done" and not is_recorded:
        has_started = metadata.attempts > _count_started_attempts(run)
        state = RunOutcome(
            state="interrupted" if end.kind == "preempted" else "failed",
            exit_code=step.exit_code if has_started else choose_exit_code(step.exit_code, step.error),
            reason=end.reason,
        )
        run.update_metadata(ended=time.time(), outcome=state)
    log = EventLog(run.events)  # after the metadata, so that `_is_end_recorded` takes their time for the past
    log.append(KIND, exit_code=step.exit_code, attempts=metadata.attempts, end=end.kind, hosts=end.hosts)
    log.close()

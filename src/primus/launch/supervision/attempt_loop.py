"""Attempt after attempt of a job: watch one, decide what follows it, begin the next.

Node 0 decides, alone; the other nodes tell it how they stand, and do what it says.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct, structs

from primus.diagnosis import diagnose
from primus.errors import EXIT_FAILED, EXIT_UNFIT, EXIT_USAGE, PrimusError
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.plan import RestartPolicy
from primus.launch.prepare import Launch, plan_attempt
from primus.launch.signals import StopSignals
from primus.launch.supervision import attempt_history as ends_file
from primus.launch.supervision import flight_recorder, heartbeats, restart_policy
from primus.launch.supervision.attempt_monitor import FAILED_PEERS_S, AttemptMonitor, NodeAttempt
from primus.launch.supervision.attempt_result import AttemptDecision, NodeResult, combine_node_results
from primus.launch.supervision.restart_policy import AttemptResult, RestartDecision
from primus.runs.events import EventLog
from primus.runs.store import RankFailure, Run, RunOutcome

NO_RESTART_VARIABLE = "PRIMUS_NO_RESTART_CODE"
"""Variable with the exit code by which a scheduler that restarts this job is told that it need not."""
HEAR_S = 0.1
LATE_S = 8.0
"""Time that another node has to end its ranks after a failure, over that of the ranks."""
NUM_EVIDENCE = 3

Say = Callable[[str], None]
Perform = Callable[[Launch, AttemptMonitor], NodeResult]
"""Does one attempt on this node."""


class NodeSession(Struct, kw_only=True):
    """A job on this node."""

    run: Run
    channel: ControlChannel
    say: Say
    perform: Perform
    environ: Mapping[str, str]


def supervise_attempts(crew: NodeSession, launch: Launch) -> RunOutcome:
    """Attempts of the job until it is done or stopped; gives how it ended, the same on every node.

    Raises:
        PrimusError: Something that the launcher itself does fails.
    """
    assert launch.plan.layout
    with StopSignals() as signals:
        lead = _lead_attempts if launch.plan.layout.node_rank == 0 else _follow_decisions
        try:
            return lead(crew, launch, signals)
        except PrimusError as error:
            crew.channel.send_message(ControlMessage(kind="lost", text=error.problem))
            raise


def _lead_attempts(crew: NodeSession, launch: Launch, signals: StopSignals) -> RunOutcome:
    """Node 0: decide after each attempt, tell the others, and go on or stop."""
    rules = launch.plan.policy or RestartPolicy()
    is_restarted_by_others = NO_RESTART_VARIABLE in crew.environ
    ended = ends_file.read_attempt_results(crew.run) if is_restarted_by_others else []
    while True:
        outcome, end = _run_attempt(crew, launch, signals)
        ended.append(end)
        decision = restart_policy.decide_restart(rules, ended)
        if (
            signals.first_signal is not None or end.kind == "preempted"
        ):  # whoever sent the signal starts it again, or nobody
            decision = structs.replace(decision, action="stop", reason="it was told to stop")
        if decision.action != "restart":
            _explain_decision(crew, rules, outcome, decision)
            return _stop_attempts(crew, outcome, decision)
        number = launch.attempt + 1
        _record_event(crew.run, "restart", attempt=number, delay_s=decision.delay_s, reason=decision.reason)
        if outcome.first_failure and outcome.first_failure.hint:  # where there is no restart, the end of the run has it
            crew.say(f"  {outcome.first_failure.hint}")
        crew.say(f"attempt {launch.attempt} failed: {outcome.reason}")
        crew.say(f"attempt {number} begins in {decision.delay_s:g} s ({decision.reason})")
        _send_decision(crew, AttemptDecision(restart=decision, outcome=outcome))
        stopped = _back_off(crew, signals, decision.delay_s, end)
        if stopped is not None:
            return _stop_attempts(crew, stopped, RestartDecision(action="stop", reason=stopped.reason))
        _send_decision(crew, AttemptDecision(start=number))
        launch = plan_next_attempt(launch, crew.run, number)


def _run_attempt(crew: NodeSession, launch: Launch, signals: StopSignals) -> tuple[RunOutcome, AttemptResult]:
    """One attempt on all nodes: how it ended, and why."""
    guard = _make_monitor(crew, launch, signals)
    own = _run_node_attempt(crew, launch, guard)
    _collect_node_results(crew, guard, own, signals)
    lost = {crew.channel.hosts.get(rank, f"node {rank}"): why for rank, why in crew.channel.lost.items()}
    if guard.failed_at is not None:
        absent = crew.channel.ranks - set(guard.ended)
        lost |= {crew.channel.hosts.get(rank, f"node {rank}"): "it did not end its ranks" for rank in absent}
    outcome, end = combine_node_results(
        launch.attempt,
        (own, *guard.ended.values()),
        heard=signals.first_signal,
        hang=guard.hang,
        lost=lost,
        saved=ends_file.find_newest_checkpoint(crew.run),
    )
    if outcome.state == "failed":
        outcome, end = _diagnose_failure(crew, outcome, end)
    with _ignore_write_errors():
        ends_file.record_attempt_result(crew.run, end)
    return outcome, end


def _run_node_attempt(crew: NodeSession, launch: Launch, guard: AttemptMonitor) -> NodeResult:
    try:
        return crew.perform(launch, guard)
    except OSError as error:  # a disk that is full, or gone
        raise PrimusError(f"attempt {launch.attempt} cannot be begun: {error.strerror or error}") from error
    finally:
        pipe = launch.plan.env.get(flight_recorder.PIPE_VARIABLE)
        if pipe is not None and pipe.source == flight_recorder.SOURCE:
            shutil.rmtree(Path(pipe.value).parent, ignore_errors=True)


def _collect_node_results(crew: NodeSession, guard: AttemptMonitor, own: NodeResult, signals: StopSignals) -> None:
    """Wait until all other nodes have said how the attempt ended there, or are lost, or somebody insists on the end."""
    if own.returncode and guard.failed_at is None and guard.hang is None:
        guard.report_own_failure()
    while crew.channel.ranks - set(guard.ended):
        guard.wait_for_others(HEAR_S)
        if signals.insists:  # the others end when our connection does
            return
        if guard.failed_at and time.monotonic() - guard.failed_at > FAILED_PEERS_S + LATE_S:
            return


def _diagnose_failure(crew: NodeSession, outcome: RunOutcome, end: AttemptResult) -> tuple[RunOutcome, AttemptResult]:
    """A failure with what the logs say of it: which rank failed first, of what, and what that asks for."""
    found = _find_causes(crew, end.attempt)
    first, told = outcome.first_failure, {}
    if first is not None:
        if end.kind == "failed":
            first = _blame_rank(crew.run.attempt_folder(end.attempt), first, found)
        first = _add_cause(first, found)
        outcome = structs.replace(outcome, exit_code=first.exit_code, reason=first.problem, first_failure=first)
        told = {"rank": first.rank, "signature": first.signature, "action": first.action}
        if end.kind == "failed":
            end = structs.replace(end, action=first.action, hosts=(first.host,), reason=first.problem)
    hosts = list(end.hosts)
    _record_event(crew.run, "failure", attempt=end.attempt, how=end.kind, hosts=hosts, problem=outcome.reason, **told)
    return outcome, end


def _find_causes(crew: NodeSession, number: int) -> diagnose.Diagnosis:
    """What the logs of attempt `number` say; the likeliest cause is told."""
    try:
        found = diagnose.diagnose_run(crew.run, number)
    except (PrimusError, OSError) as error:
        crew.say(f"the logs cannot be read: {error}")
        return diagnose.Diagnosis()
    cause = found.cause
    if cause is not None:
        crew.say(f"cause: {cause.summary} ({cause.signature})")
        for evidence in cause.evidence[:NUM_EVIDENCE]:
            if not evidence.file.endswith(diagnose.ERROR_SUFFIX):  # what a rank says of itself is the run's reason
                crew.say(f"  {evidence.file}:{evidence.line}: {evidence.text}")
    return found


def _add_cause(first: RankFailure, found: diagnose.Diagnosis) -> RankFailure:
    """The first failure with its cause, what helps, and what follows: the end where the rank itself asks for it."""
    if first.exit_code in (EXIT_USAGE, EXIT_UNFIT):
        first = structs.replace(first, action="stop")
    if found.cause is None:
        return first
    action = "stop" if first.action == "stop" else found.action
    hint = first.hint or found.cause.fix
    return structs.replace(first, action=action, signature=found.cause.signature, hint=hint)


def _blame_rank(folder: Path, first: RankFailure, found: diagnose.Diagnosis) -> RankFailure:
    """The failure of the rank that failed first by the logs: it need not be the first that said so."""
    if found.cause is None or found.first_rank is None or found.first_rank == first.rank:
        return first
    said = next(iter(heartbeats.read_failures(folder, [found.first_rank])), None)
    return said or structs.replace(first, rank=found.first_rank, host=found.first_host or first.host)


def _explain_decision(crew: NodeSession, rules: RestartPolicy, outcome: RunOutcome, decision: RestartDecision) -> None:
    """Say why there is no restart where somebody has asked for restarts."""
    if outcome.state == "failed" and (rules.max_restarts or decision.is_final) and decision.reason:
        crew.say(f"no restart: {decision.reason}")


def _stop_attempts(crew: NodeSession, outcome: RunOutcome, decision: RestartDecision) -> RunOutcome:
    if decision.is_final:
        outcome = structs.replace(outcome, exit_code=no_restart_code(crew.environ, outcome.exit_code))
    _send_decision(crew, AttemptDecision(restart=decision, outcome=outcome))
    return outcome


def no_restart_code(environ: Mapping[str, str], code: int | None) -> int | None:
    """The exit code of a job that nobody should restart; `code` where no scheduler wants another one."""
    wanted = environ.get(NO_RESTART_VARIABLE, "")
    return int(wanted) if wanted.isdecimal() and 0 < int(wanted) < 256 else code


def _send_decision(crew: NodeSession, decision: AttemptDecision) -> None:
    crew.channel.send_message(ControlMessage(kind="decision", body=decision))


def _back_off(crew: NodeSession, signals: StopSignals, delay_s: float, end: AttemptResult) -> RunOutcome | None:
    """Wait; gives the outcome where something comes between."""
    until = time.monotonic() + delay_s
    while True:
        for _, message in crew.channel.receive_messages(0.0):
            if message.kind == "signal":
                signals.note_signal(message.number)
        if signals.first_signal is not None:
            name = signal.Signals(signals.first_signal).name
            reason = f"{name}, before the next attempt; the last one failed: {end.reason}"
            return RunOutcome(state="interrupted", exit_code=128 + signals.first_signal, reason=reason)
        if crew.channel.lost:
            rank, why = next(iter(crew.channel.lost.items()))
            host = crew.channel.hosts.get(rank, f"node {rank}")
            reason = f"{host} was lost: {why}"
            with _ignore_write_errors():
                ends_file.record_attempt_result(
                    crew.run, structs.replace(end, kind="lost node", hosts=(host,), reason=reason)
                )
            return RunOutcome(state="failed", exit_code=EXIT_FAILED, reason=reason)
        left = until - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(HEAR_S, left))


def _follow_decisions(crew: NodeSession, launch: Launch, signals: StopSignals) -> RunOutcome:
    """Another node: do what node 0 decides."""
    while True:
        guard = _make_monitor(crew, launch, signals)
        own = _run_node_attempt(crew, launch, guard)
        guard.report_result(own)
        told = _wait_for_decision(crew, guard, signals)
        if told is None or told.restart is None or told.restart.action != "restart":
            return _read_outcome(crew, told, signals)
        crew.say(f"attempt {launch.attempt + 1} begins in {told.restart.delay_s:g} s ({told.restart.reason})")
        then = _wait_for_decision(crew, guard, signals)
        if then is None or then.start is None:
            return _read_outcome(crew, then, signals)
        launch = plan_next_attempt(launch, crew.run, then.start)


def _wait_for_decision(crew: NodeSession, guard: AttemptMonitor, signals: StopSignals) -> AttemptDecision | None:
    """The next thing that node 0 decides; None where it is lost, or somebody here does not want to wait for it."""
    while (found := guard.take_decision()) is None and not signals.insists:
        if crew.channel.lost:
            guard.wait_for_others(0.0)
            return guard.take_decision()
        guard.wait_for_others(HEAR_S)
    return found


def _read_outcome(crew: NodeSession, told: AttemptDecision | None, signals: StopSignals) -> RunOutcome:
    if told is not None and told.outcome is not None:
        return told.outcome
    if signals.first_signal is not None and signals.insists:
        reason = f"{signal.Signals(signals.first_signal).name}, before node 0 had decided"
        return RunOutcome(state="interrupted", exit_code=128 + signals.first_signal, reason=reason)
    why = next(iter(crew.channel.lost.values()), "it gave no outcome")
    return RunOutcome(
        state="failed", exit_code=EXIT_FAILED, reason=f"node 0 ({crew.channel.hosts.get(0, '?')}) was lost: {why}"
    )


def plan_next_attempt(launch: Launch, run: Run, number: int) -> Launch:
    """`launch` as attempt `number` of the same run, with all that hooks and patches have set."""
    job = structs.replace(launch.job, resume=str(run.directory))
    return plan_attempt(job, launch.request, launch.command, launch.context, run.directory, number)


def _make_monitor(crew: NodeSession, launch: Launch, signals: StopSignals) -> AttemptMonitor:
    shape, rules = launch.plan.layout, launch.plan.policy or RestartPolicy()
    assert shape
    is_by_arrival = shape.nnodes > 1 and "--rdzv-backend=c10d" in launch.plan.argv
    first = shape.node_rank * shape.nproc
    environ = dict(crew.environ) | {name: variable.value for name, variable in launch.plan.env.items()}
    for name in (*flight_recorder.DUMP_VARIABLES, flight_recorder.PIPE_VARIABLE):
        if name in launch.plan.env:
            with contextlib.suppress(OSError):
                Path(environ[name]).parent.mkdir(parents=True, exist_ok=True)
    place = NodeAttempt(
        folder=crew.run.attempt_folder(launch.attempt),
        layout=shape,
        ranks=() if is_by_arrival else tuple(range(first, first + shape.nproc)),
        environ=environ,
        hang_timeout_s=rules.hang_timeout_s,
    )

    def record(kind: str, **fields: object) -> None:
        _record_event(crew.run, kind, attempt=launch.attempt, **fields)

    return AttemptMonitor(place, crew.channel, signals, record, crew.say)


def _record_event(run: Run, kind: str, **fields: object) -> None:
    with _ignore_write_errors():
        log = EventLog(run.events)
        log.append(kind, **fields)
        log.close()


@contextlib.contextmanager
def _ignore_write_errors() -> Iterator[None]:
    """A full disk must not end the supervision of what may still free it; it is said."""
    try:
        yield
    except (OSError, PrimusError) as error:
        print(f"primus-cli: events.jsonl: {error}", file=sys.stderr)

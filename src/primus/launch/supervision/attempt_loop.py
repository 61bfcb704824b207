"""Runs the attempts of a job: monitors one, decides what follows it, starts the next.

Node 0 decides for all nodes:

    node 0   attempt -> results of all nodes -> decision -> wait (back-off) -> start -> attempt ...
    node k   attempt -> sends its result ------> decision ------------------> start -> attempt ...

Every decision reaches all nodes, so that they return the same outcome. A node that loses node 0 stops. `StopSignals`
stays open over all attempts, because a signal may also arrive between two of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct, structs

from primus.errors import EXIT_FAILED, PrimusError
from primus.launch.node_connections import NodeConnections
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.prepare import Launch, plan_attempt
from primus.launch.run_folder import record_environment, record_start
from primus.launch.signals import StopSignals
from primus.launch.supervision import attempt_history, flight_recorder, restart_policy
from primus.launch.supervision.attempt_monitor import FAILED_PEERS_S, AttemptMonitor, NodeAttempt
from primus.launch.supervision.attempt_result import AttemptDecision, NodeResult, combine_node_results
from primus.launch.supervision.restart_policy import AttemptResult, RestartDecision
from primus.launch.supervision.worker_processes import WorkerProcesses
from primus.machine.host.kernel_counters import compute_other_share, read_cpu_times
from primus.messages import Say
from primus.plan import RestartPolicy
from primus.runs.events import LOAD_EVENT, EventLog
from primus.runs.store import Run, RunOutcome

NO_RESTART_VARIABLE = "PRIMUS_NO_RESTART_CODE"
"""Exit code that tells the scheduler of this job not to restart it."""
RECEIVE_S = 0.1
"""Time between two looks at signals while this node waits for others."""
LOST_BEFORE_S = 0.5
"""The thread that receives may see the end of a connection a little later than the signal that follows it arrives."""
LATE_RESULT_S = 8.0
"""Time that another node has, after that of its ranks, to kill them, redact their logs and send its result."""


class NodeSession(Struct, kw_only=True):
    """A job on this node."""

    run: Run
    nodes: NodeConnections
    say: Say
    environ: Mapping[str, str]
    keeps_record: bool
    """Whether this node writes the metadata: of the nodes that share a run folder, one does."""

    @property
    def channel(self) -> ControlChannel:
        """The channel to the other nodes."""
        return self.nodes.control_channel


def supervise_attempts(session: NodeSession, launch: Launch) -> RunOutcome:
    """Run attempts of the job until it is done or stopped; gives how it ended, the same on every node.

    Raises:
        PrimusError: The launcher itself fails, for example because the disk is full.
    """
    assert launch.plan.layout
    with StopSignals() as signals:
        run_attempts = _lead_attempts if launch.plan.layout.node_rank == 0 else _follow_decisions
        try:
            return run_attempts(session, launch, signals)
        except PrimusError as error:
            # The other nodes stop with this reason; this one still runs its hooks, connected.
            session.channel.send_message(ControlMessage(kind="lost", text=error.problem))
            raise


def _lead_attempts(session: NodeSession, launch: Launch, signals: StopSignals) -> RunOutcome:
    """Node 0: decide after each attempt, tell the others, and restart or stop."""
    policy = launch.plan.policy or RestartPolicy()
    # Attempts of earlier starts count only if a scheduler restarts the job: a user who starts it again has requested
    # it.
    is_restarted_by_scheduler = NO_RESTART_VARIABLE in session.environ
    results = attempt_history.read_attempt_results(session.run) if is_restarted_by_scheduler else []
    while True:
        outcome, result = _run_attempt(session, launch, signals)
        results.append(result)
        decision = restart_policy.decide_restart(policy, results)
        if signals.first_signal is not None or result.kind == "preempted":
            # A restart after a signal is up to its sender.
            decision = structs.replace(decision, action="stop", reason="a signal asked it to stop")
        if decision.action != "restart":
            _explain_decision(session, policy, outcome, decision)
            return _stop_attempts(session, outcome, decision)
        number = launch.attempt + 1
        _announce_restart(session, launch, outcome, decision)
        stopped = _back_off(session, signals, decision.delay_s, result)
        if stopped is not None:
            return _stop_attempts(session, stopped, RestartDecision(action="stop", reason=stopped.reason))
        _send_decision(session, AttemptDecision(start=number))
        launch = plan_next_attempt(launch, session.run, number)


def _announce_restart(session: NodeSession, launch: Launch, outcome: RunOutcome, decision: RestartDecision) -> None:
    number = launch.attempt + 1
    _record_event(session.run, "restart", attempt=number, delay_s=decision.delay_s, reason=decision.reason)
    if outcome.first_failure and outcome.first_failure.hint:  # without a restart, the end of the run prints it
        session.say(f"  {outcome.first_failure.hint}")
    session.say(f"attempt {launch.attempt} failed: {outcome.reason}")
    session.say(f"attempt {number} starts in {decision.delay_s:g} s ({decision.reason})")
    _send_decision(session, AttemptDecision(restart=decision, outcome=outcome))


def _run_attempt(session: NodeSession, launch: Launch, signals: StopSignals) -> tuple[RunOutcome, AttemptResult]:
    """Node 0: one attempt on all nodes, and how it ended."""
    monitor, own = _run_node_attempt(session, launch, signals)
    _collect_node_results(session, monitor, own, signals)
    channel = session.channel
    # By host name: ranks of nodes change when a scheduler starts the job again.
    lost = {channel.hosts.get(rank, f"node {rank}"): reason for rank, reason in channel.lost.items()}
    if monitor.failed_at is not None:
        late = channel.ranks - set(monitor.node_results)
        lost |= {channel.hosts.get(rank, f"node {rank}"): "it did not stop its ranks in time" for rank in late}
    outcome, result = combine_node_results(
        launch.attempt,
        (own, *monitor.node_results.values()),
        received_signal=None if _is_sent_for_lost_node(channel, signals) else signals.first_signal,
        hang=monitor.hang,
        lost=lost,
        saved=attempt_history.find_newest_checkpoint(session.run),
    )
    # Before the result is recorded: the cause decides the action, which the restart depends on.
    if outcome.state == "failed":
        outcome, result = _explain_failure(session, outcome, result)
    with _ignore_write_errors():
        attempt_history.record_attempt_result(session.run, result)
    return outcome, result


def _is_sent_for_lost_node(channel: ControlChannel, signals: StopSignals) -> bool:
    """Whether the signal is that by which a scheduler ends a step that has lost a task: nobody asked the job to stop.

    srun sends SIGTERM to the other tasks of such a step (--kill-on-bad-exit). The connection of the lost launcher ends
    before that, if not by much. A launcher that is asked to stop itself saves first, and leaves after a decision.
    """
    if channel.died_at is None or signals.first_at is None:
        return False
    return channel.died_at < signals.first_at + LOST_BEFORE_S


def _explain_failure(
    session: NodeSession, outcome: RunOutcome, result: AttemptResult
) -> tuple[RunOutcome, AttemptResult]:
    from primus.launch.supervision.failure_cause import diagnose_failure  # most runs end well
    from primus.launch.supervision.node_failures import record_node_failure

    outcome, result, diagnosis = diagnose_failure(session.run, outcome, result, session.say)
    is_alone = not session.channel.hosts
    record_node_failure(session.run, result, diagnosis, session.environ, session.say, is_alone=is_alone)
    first = outcome.first_failure
    fields = {"rank": first.rank, "signature": first.signature, "action": first.action} if first else {}
    hosts, problem = list(result.hosts), outcome.reason
    _record_event(
        session.run, "failure", attempt=result.attempt, how=result.kind, hosts=hosts, problem=problem, **fields
    )
    return outcome, result


def _run_node_attempt(session: NodeSession, launch: Launch, signals: StopSignals) -> tuple[AttemptMonitor, NodeResult]:
    """Run an attempt on this node; gives how it ended, and the monitor that watched it."""
    record_start(launch, session.run, session.say, keeps_record=session.keeps_record)
    try:
        _make_recorder_folders(launch)
        with WorkerProcesses(launch.plan, session.run, launch.attempt, session.environ) as processes:
            began = read_cpu_times()
            monitor = _make_monitor(session, launch, signals)
            record_environment(launch, session.run)  # while they start
            processes.wait(monitor)
        result = processes.make_result(monitor)
        if launch.plan.layout and launch.plan.layout.node_rank == 0:
            share = compute_other_share(began, read_cpu_times(), os.cpu_count() or 1)
            _record_event(session.run, LOAD_EVENT, attempt=launch.attempt, other_cpu_share=share)
        return monitor, result
    except OSError as error:  # a disk that is full, or that was unmounted
        raise PrimusError(f"attempt {launch.attempt} cannot start: {error.strerror or error}") from error
    finally:
        # Named pipes are outside of the run folder, so nothing else would remove them.
        pipe = launch.plan.env.get(flight_recorder.PIPE_VARIABLE)
        if pipe is not None and pipe.source == flight_recorder.SOURCE:
            shutil.rmtree(Path(pipe.value).parent, ignore_errors=True)


def _collect_node_results(session: NodeSession, monitor: AttemptMonitor, own: NodeResult, signals: StopSignals) -> None:
    """Wait until all other nodes have sent their result or are lost, or a second signal ends the wait."""
    if own.returncode:  # the monitor may have seen nothing, for example if the agent failed before any rank started
        monitor.report_failure()
    while session.channel.ranks - set(monitor.node_results):
        monitor.wait_for_others(RECEIVE_S)
        if signals.insists:  # the other nodes end when our connections do
            return
        if monitor.failed_at and time.monotonic() - monitor.failed_at > FAILED_PEERS_S + LATE_RESULT_S:
            return


def _explain_decision(
    session: NodeSession, policy: RestartPolicy, outcome: RunOutcome, decision: RestartDecision
) -> None:
    """Print the reason not to restart, if restarts were requested."""
    if outcome.state == "failed" and (policy.max_restarts or decision.is_final) and decision.reason:
        session.say(f"no restart: {decision.reason}")


def _stop_attempts(session: NodeSession, outcome: RunOutcome, decision: RestartDecision) -> RunOutcome:
    if decision.is_final:
        outcome = structs.replace(outcome, exit_code=choose_exit_code(session.environ, outcome.exit_code))
    _send_decision(session, AttemptDecision(restart=decision, outcome=outcome))
    return outcome


def _send_decision(session: NodeSession, decision: AttemptDecision) -> None:
    session.channel.send_message(ControlMessage(kind="decision", body=decision))


def choose_exit_code(environ: Mapping[str, str], code: int | None) -> int | None:
    """The exit code of a job that must not be restarted; `code` if no scheduler asks for another one."""
    wanted = environ.get(NO_RESTART_VARIABLE, "")
    return int(wanted) if wanted.isdecimal() and 0 < int(wanted) < 256 else code


def _back_off(session: NodeSession, signals: StopSignals, delay_s: float, result: AttemptResult) -> RunOutcome | None:
    """Node 0: wait before the next attempt; gives the outcome if a signal or a lost node ends the job."""
    until = time.monotonic() + delay_s
    while True:
        for _, message in session.channel.receive_messages(0.0):
            if message.kind == "signal":
                signals.note_signal(message.number)
        if signals.first_signal is not None:
            name = signal.Signals(signals.first_signal).name
            reason = f"{name}, before the next attempt; the last one failed: {result.reason}"
            return RunOutcome(state="interrupted", exit_code=128 + signals.first_signal, reason=reason)
        # No attempt can start without the node, and the recorded result lets a scheduler exclude it.
        if session.channel.lost:
            rank, why = next(iter(session.channel.lost.items()))
            host = session.channel.hosts.get(rank, f"node {rank}")
            reason = f"{host} was lost: {why}"
            lost = structs.replace(result, kind="lost node", hosts=(host,), reason=reason)
            with _ignore_write_errors():
                attempt_history.record_attempt_result(session.run, lost)
            return RunOutcome(state="failed", exit_code=EXIT_FAILED, reason=reason)
        left = until - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(RECEIVE_S, left))


def _follow_decisions(session: NodeSession, launch: Launch, signals: StopSignals) -> RunOutcome:
    """Another node: run attempts as node 0 decides."""
    while True:
        monitor, result = _run_node_attempt(session, launch, signals)
        monitor.report_result(result)
        decision = _wait_for_decision(session, monitor, signals)
        if decision is None or decision.restart is None or decision.restart.action != "restart":
            return _read_outcome(session, decision, signals)
        restart = decision.restart
        session.say(f"attempt {launch.attempt + 1} starts in {restart.delay_s:g} s ({restart.reason})")
        # Node 0 may still stop instead, for a signal or a node that is lost during the back-off.
        decision = _wait_for_decision(session, monitor, signals)
        if decision is None or decision.start is None:
            return _read_outcome(session, decision, signals)
        launch = plan_next_attempt(launch, session.run, decision.start)


def _wait_for_decision(session: NodeSession, monitor: AttemptMonitor, signals: StopSignals) -> AttemptDecision | None:
    """The next decision of node 0; None if node 0 is lost, or a second signal ends the wait."""
    while (decision := monitor.take_decision()) is None and not signals.insists:
        if session.channel.lost:
            monitor.wait_for_others(0.0)  # the decision may have arrived just before the connection ended
            return monitor.take_decision()
        monitor.wait_for_others(RECEIVE_S)
    return decision


def _read_outcome(session: NodeSession, decision: AttemptDecision | None, signals: StopSignals) -> RunOutcome:
    """The outcome that node 0 sent; the outcome of this node if it sent none."""
    if decision is not None and decision.outcome is not None:
        return decision.outcome
    if signals.first_signal is not None and signals.insists:
        reason = f"{signal.Signals(signals.first_signal).name}, before the decision of node 0"
        return RunOutcome(state="interrupted", exit_code=128 + signals.first_signal, reason=reason)
    why = next(iter(session.channel.lost.values()), "it sent no outcome")
    reason = f"node 0 ({session.channel.hosts.get(0, '?')}) was lost: {why}"
    return RunOutcome(state="failed", exit_code=EXIT_FAILED, reason=reason)


def plan_next_attempt(launch: Launch, run: Run, number: int) -> Launch:
    """`launch` as attempt `number` of the same run, with all settings of hooks and patches."""
    job = structs.replace(launch.job, resume=str(run.directory))
    return plan_attempt(structs.replace(launch, job=job, directory=str(run.directory), attempt=number))


def _make_monitor(session: NodeSession, launch: Launch, signals: StopSignals) -> AttemptMonitor:
    shape, policy = launch.plan.layout, launch.plan.policy or RestartPolicy()
    assert shape
    # With c10d, node k need not have the ranks k*n to k*n + n - 1: its heartbeats show which it has.
    is_numbered_by_rendezvous = shape.nnodes > 1 and "--rdzv-backend=c10d" in launch.plan.argv
    first = shape.node_rank * shape.nproc
    attempt = NodeAttempt(
        folder=session.run.attempt_folder(launch.attempt),
        layout=shape,
        ranks=() if is_numbered_by_rendezvous else tuple(range(first, first + shape.nproc)),
        environ=launch.make_environ(),
        hang_timeout_s=policy.hang_timeout_s,
    )

    def record(kind: str, **fields: object) -> None:
        _record_event(session.run, kind, attempt=launch.attempt, **fields)

    return AttemptMonitor(attempt, session.channel, signals, record, session.say)


def _make_recorder_folders(launch: Launch) -> None:
    """Create the folders of the dumps and pipes of PyTorch's flight recorder, which does not create them."""
    for name in (*flight_recorder.DUMP_VARIABLES, flight_recorder.PIPE_VARIABLE):
        if name in launch.plan.env:
            with contextlib.suppress(OSError):
                Path(launch.plan.env[name].value).parent.mkdir(parents=True, exist_ok=True)


def _record_event(run: Run, kind: str, **fields: object) -> None:
    with _ignore_write_errors():
        log = EventLog(run.events)
        log.append(kind, **fields)
        log.close()


@contextlib.contextmanager
def _ignore_write_errors() -> Iterator[None]:
    """Print an error of the disk instead of raising it: supervision continues, and its job may free the space."""
    try:
        yield
    except (OSError, PrimusError) as error:
        print(f"primus-cli: events.jsonl: {error}", file=sys.stderr)

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
from primus.launch import ends as ends_file
from primus.launch import policy, ranks, recorder
from primus.launch.bond import Bond, Message
from primus.launch.guard import FAILED_PEERS_S, Guard, Place
from primus.launch.policy import Decision, End, Policy
from primus.launch.prepare import Launch, planned
from primus.launch.signals import Signals
from primus.launch.verdict import Ended, outcome_of
from primus.runs.events import EventLog
from primus.runs.store import Failure, Outcome, Run

NO_RESTART_VARIABLE = "PRIMUS_NO_RESTART_CODE"
"""Variable with the exit code by which a scheduler that restarts this job is told that it need not."""
HEAR_S = 0.1
LATE_S = 8.0
"""Time that another node has to end its ranks after a failure, over that of the ranks."""
NUM_EVIDENCE = 3

Say = Callable[[str], None]
Perform = Callable[[Launch, Guard], Ended]
"""Does one attempt on this node."""


class Crew(Struct, kw_only=True):
    """A job on this node."""

    run: Run
    bond: Bond
    say: Say
    perform: Perform
    environ: Mapping[str, str]


def supervised(crew: Crew, launch: Launch) -> Outcome:
    """Attempts of the job until it is done or stopped; gives how it ended, the same on every node.

    Raises:
        PrimusError: Something that the launcher itself does fails.
    """
    assert launch.plan.layout
    with Signals() as signals:
        lead = _lead if launch.plan.layout.node_rank == 0 else _follow
        try:
            return lead(crew, launch, signals)
        except PrimusError as error:
            failed = Outcome(state="failed", exit_code=error.exit_code, reason=error.problem)
            crew.bond.send(Message(kind="lost", text=error.problem, outcome=failed))
            raise


def _lead(crew: Crew, launch: Launch, signals: Signals) -> Outcome:
    """Node 0: decide after each attempt, tell the others, and go on or stop."""
    rules = launch.plan.policy or Policy()
    is_restarted_by_others = NO_RESTART_VARIABLE in crew.environ
    ended = ends_file.ends_of(crew.run) if is_restarted_by_others else []
    while True:
        outcome, end = _attempted(crew, launch, signals)
        ended.append(end)
        decision = policy.decide(rules, ended)
        if signals.first is not None or end.kind == "preempted":  # whoever sent the signal starts it again, or nobody
            decision = structs.replace(decision, action="stop", reason="it was told to stop")
        if decision.action != "restart":
            _explain(crew, rules, outcome, decision)
            return _stop(crew, outcome, decision)
        number = launch.attempt + 1
        _record(crew.run, "restart", attempt=number, delay_s=decision.delay_s, reason=decision.reason)
        if outcome.first_failure and outcome.first_failure.hint:  # where there is no restart, the end of the run has it
            crew.say(f"  {outcome.first_failure.hint}")
        crew.say(f"attempt {launch.attempt} failed: {outcome.reason}")
        crew.say(f"attempt {number} begins in {decision.delay_s:g} s ({decision.reason})")
        crew.bond.send(Message(kind="decision", number=number, decision=decision, outcome=outcome))
        stopped = _back_off(crew, signals, decision.delay_s, end)
        if stopped is not None:
            return _stop(crew, stopped, Decision(action="stop", reason=stopped.reason))
        crew.bond.send(Message(kind="again", number=number))
        launch = again(launch, crew.run, number)


def _attempted(crew: Crew, launch: Launch, signals: Signals) -> tuple[Outcome, End]:
    """One attempt on all nodes: how it ended, and why."""
    guard = _guard(crew, launch, signals)
    own = _performed(crew, launch, guard)
    _gather(crew, guard, own, signals)
    lost = {crew.bond.hosts.get(rank, f"node {rank}"): why for rank, why in crew.bond.lost.items()}
    if guard.failed_at is not None:
        absent = crew.bond.ranks - set(guard.ended)
        lost |= {crew.bond.hosts.get(rank, f"node {rank}"): "it did not end its ranks" for rank in absent}
    outcome, end = outcome_of(
        launch.attempt,
        (own, *guard.ended.values()),
        heard=signals.first,
        hang=guard.hang,
        lost=lost,
        saved=ends_file.newest_checkpoint(crew.run),
    )
    if outcome.state == "failed":
        outcome, end = _diagnosed(crew, outcome, end)
    with _as_far_as_possible():
        ends_file.note(crew.run, end)
    return outcome, end


def _performed(crew: Crew, launch: Launch, guard: Guard) -> Ended:
    try:
        return crew.perform(launch, guard)
    except OSError as error:  # a disk that is full, or gone
        raise PrimusError(f"attempt {launch.attempt} cannot be begun: {error.strerror or error}") from error
    finally:
        pipe = launch.plan.env.get(recorder.PIPE_VARIABLE)
        if pipe is not None and pipe.source == recorder.SOURCE:
            shutil.rmtree(Path(pipe.value).parent, ignore_errors=True)


def _gather(crew: Crew, guard: Guard, own: Ended, signals: Signals) -> None:
    """Wait until all other nodes have said how the attempt ended there, or are lost, or somebody insists on the end."""
    if own.returncode and guard.failed_at is None and guard.hang is None:
        guard.fail_here()
    while crew.bond.ranks - set(guard.ended):
        guard.wait_for_others(HEAR_S)
        if signals.insists:  # the others end when our connection does
            return
        if guard.failed_at and time.monotonic() - guard.failed_at > FAILED_PEERS_S + LATE_S:
            return


def _diagnosed(crew: Crew, outcome: Outcome, end: End) -> tuple[Outcome, End]:
    """A failure with what the logs say of it: which rank failed first, of what, and what that asks for."""
    found = _causes(crew, end.attempt)
    first, told = outcome.first_failure, {}
    if first is not None:
        if end.kind == "failed":
            first = _blamed(crew.run.attempt(end.attempt), first, found)
        first = _with_cause(first, found)
        outcome = structs.replace(outcome, exit_code=first.exit_code, reason=first.problem, first_failure=first)
        told = {"rank": first.rank, "signature": first.signature, "action": first.action}
        if end.kind == "failed":
            end = structs.replace(end, action=first.action, hosts=(first.host,), reason=first.problem)
    hosts = list(end.hosts)
    _record(crew.run, "failure", attempt=end.attempt, how=end.kind, hosts=hosts, problem=outcome.reason, **told)
    return outcome, end


def _causes(crew: Crew, number: int) -> diagnose.Diagnosis:
    """What the logs of attempt `number` say; the likeliest cause is told."""
    try:
        found = diagnose.of_run(crew.run, number)
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


def _with_cause(first: Failure, found: diagnose.Diagnosis) -> Failure:
    """The first failure with its cause, what helps, and what follows: the end where the rank itself asks for it."""
    if first.exit_code in (EXIT_USAGE, EXIT_UNFIT):
        first = structs.replace(first, action="stop")
    if found.cause is None:
        return first
    action = "stop" if first.action == "stop" else found.action
    hint = first.hint or found.cause.fix
    return structs.replace(first, action=action, signature=found.cause.signature, hint=hint)


def _blamed(folder: Path, first: Failure, found: diagnose.Diagnosis) -> Failure:
    """The failure of the rank that failed first by the logs: it need not be the first that said so."""
    if found.cause is None or found.first_rank is None or found.first_rank == first.rank:
        return first
    said = next(iter(ranks.errors(folder, [found.first_rank])), None)
    return said or structs.replace(first, rank=found.first_rank, host=found.first_host or first.host)


def _explain(crew: Crew, rules: Policy, outcome: Outcome, decision: Decision) -> None:
    """Say why there is no restart where somebody has asked for restarts."""
    if outcome.state == "failed" and (rules.max_restarts or decision.is_final) and decision.reason:
        crew.say(f"no restart: {decision.reason}")


def _stop(crew: Crew, outcome: Outcome, decision: Decision) -> Outcome:
    if decision.is_final:
        outcome = structs.replace(outcome, exit_code=no_restart_code(crew.environ, outcome.exit_code))
    crew.bond.send(Message(kind="decision", decision=decision, outcome=outcome))
    return outcome


def no_restart_code(environ: Mapping[str, str], code: int | None) -> int | None:
    """The exit code of a job that nobody should restart; `code` where no scheduler wants another one."""
    wanted = environ.get(NO_RESTART_VARIABLE, "")
    return int(wanted) if wanted.isdecimal() and 0 < int(wanted) < 256 else code


def _back_off(crew: Crew, signals: Signals, delay_s: float, end: End) -> Outcome | None:
    """Wait; gives the outcome where something comes between."""
    until = time.monotonic() + delay_s
    while True:
        for _, message in crew.bond.received(0.0):
            if message.kind == "signal":
                signals.note(message.number)
        if signals.first is not None:
            name = signal.Signals(signals.first).name
            reason = f"{name}, before the next attempt; the last one failed: {end.reason}"
            return Outcome(state="interrupted", exit_code=128 + signals.first, reason=reason)
        if crew.bond.lost:
            rank, why = next(iter(crew.bond.lost.items()))
            host = crew.bond.hosts.get(rank, f"node {rank}")
            reason = f"{host} was lost: {why}"
            with _as_far_as_possible():
                ends_file.note(crew.run, structs.replace(end, kind="lost node", hosts=(host,), reason=reason))
            return Outcome(state="failed", exit_code=EXIT_FAILED, reason=reason)
        left = until - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(HEAR_S, left))


def _follow(crew: Crew, launch: Launch, signals: Signals) -> Outcome:
    """Another node: do what node 0 decides."""
    while True:
        guard = _guard(crew, launch, signals)
        own = _performed(crew, launch, guard)
        guard.say_ended(own)
        told = _told(crew, guard, signals)
        if told is None or told.decision is None or told.decision.action != "restart":
            return _outcome_told(crew, told, signals)
        crew.say(f"attempt {told.number} begins in {told.decision.delay_s:g} s ({told.decision.reason})")
        then = _told(crew, guard, signals)
        if then is None or then.kind != "again":
            return _outcome_told(crew, then, signals)
        launch = again(launch, crew.run, then.number)


def _told(crew: Crew, guard: Guard, signals: Signals) -> Message | None:
    """The next thing that node 0 decides; None where it is lost, or somebody here does not want to wait for it."""
    while (found := guard.decision()) is None and not signals.insists:
        if crew.bond.lost:
            guard.wait_for_others(0.0)
            return guard.decision()
        guard.wait_for_others(HEAR_S)
    return found


def _outcome_told(crew: Crew, told: Message | None, signals: Signals) -> Outcome:
    if told is not None and told.outcome is not None:
        return told.outcome
    if signals.first is not None and signals.insists:
        reason = f"{signal.Signals(signals.first).name}, before node 0 had decided"
        return Outcome(state="interrupted", exit_code=128 + signals.first, reason=reason)
    why = next(iter(crew.bond.lost.values()), "it gave no outcome")
    return Outcome(
        state="failed", exit_code=EXIT_FAILED, reason=f"node 0 ({crew.bond.hosts.get(0, '?')}) was lost: {why}"
    )


def again(launch: Launch, run: Run, number: int) -> Launch:
    """`launch` as attempt `number` of the same run, with all that hooks and patches have set."""
    job = structs.replace(launch.job, resume=str(run.directory))
    return planned(job, launch.request, launch.command, launch.context, run.directory, number)


def _guard(crew: Crew, launch: Launch, signals: Signals) -> Guard:
    shape, rules = launch.plan.layout, launch.plan.policy or Policy()
    assert shape
    is_by_arrival = shape.nnodes > 1 and "--rdzv-backend=c10d" in launch.plan.argv
    first = shape.node_rank * shape.nproc
    environ = dict(crew.environ) | {name: variable.value for name, variable in launch.plan.env.items()}
    for name in (*recorder.DUMP_VARIABLES, recorder.PIPE_VARIABLE):
        if name in launch.plan.env:
            with contextlib.suppress(OSError):
                Path(environ[name]).parent.mkdir(parents=True, exist_ok=True)
    place = Place(
        folder=crew.run.attempt(launch.attempt),
        layout=shape,
        ranks=() if is_by_arrival else tuple(range(first, first + shape.nproc)),
        environ=environ,
        hang_timeout_s=rules.hang_timeout_s,
    )

    def record(kind: str, **fields: object) -> None:
        _record(crew.run, kind, attempt=launch.attempt, **fields)

    return Guard(place, crew.bond, signals, record, crew.say)


def _record(run: Run, kind: str, **fields: object) -> None:
    with _as_far_as_possible():
        log = EventLog(run.events)
        log.append(kind, **fields)
        log.close()


@contextlib.contextmanager
def _as_far_as_possible() -> Iterator[None]:
    """A full disk must not end the supervision of what may still free it; it is said."""
    try:
        yield
    except (OSError, PrimusError) as error:
        print(f"primus-cli: events.jsonl: {error}", file=sys.stderr)

"""Run a prepared job on this node: make or continue its run folder, perform the plan, record how it ended."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msgspec import structs

from primus.errors import PrimusError
from primus.launch import plan, run_folder, show
from primus.launch.hooks import discovery, runner
from primus.launch.hooks.runner import HookContextFacts, HookResult
from primus.launch.nodes import exit_barrier, rendezvous
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.nodes.rendezvous import RendezvousPeer
from primus.launch.plan import Variable
from primus.launch.prepare import Launch, amend_launch, plan_attempt
from primus.launch.supervision import attempt_loop, worker_processes
from primus.launch.supervision.attempt_loop import NodeSession
from primus.launch.supervision.attempt_monitor import AttemptMonitor
from primus.launch.supervision.attempt_result import NodeResult
from primus.machine.cluster import ClusterLayout
from primus.redaction import MASK, is_secret_name, learn, redact
from primus.runs import patch_records, snapshot
from primus.runs.events import EventLog
from primus.runs.files import write_json, write_text
from primus.runs.store import Run, RunOutcome

RENDEZVOUS_TIMEOUT_S = 600.0
HOOK_LOGS = "logs/hooks"
CONFIG_FILE = "config/primus_config.yaml"

Say = Callable[[str], None]
SKIP_VARIABLE = "PRIMUS_SKIP_MAIN_LAUNCH"
"""Set to 1 by a hook whose work is all that is wanted, as the offline GEMM tuning of AMD-AGI/Primus."""


def run_node(launch: Launch, say: Say, leaving: ExitStack) -> tuple[Run, RunOutcome]:
    """Execute a prepared launch and record it; gives its run folder and how it ended.

    Args:
        launch: What is done.
        say: For people.
        leaving: Closed once there is nothing more to say; then the nodes of the job leave together.

    Raises:
        PrimusError: Something that the launcher itself does fails, or a hook; a failing worker is an Outcome.
    """
    shape = launch.plan.layout
    assert shape is not None
    nodes = _NodeConnections(launch, shape)
    leaving.push(nodes.leave_job)
    if shape.node_rank > 0:
        return _run_other_node(launch, shape, say, nodes)
    if shape.master_port is not None:
        rendezvous.check_port_free(shape.master_port)
    return _run_head_node(launch, shape, say, nodes)


class _NodeConnections:
    """The other nodes of the job, from the first word with them to the last."""

    def __init__(self, launch: Launch, shape: ClusterLayout) -> None:
        self.kept: dict[int, RendezvousPeer] = {}
        """Filled by the rendezvous."""
        self.run: Run | None = None
        """On node 0."""
        self._shape = shape
        self._channel: ControlChannel | None = None
        after = [each.timeout_s for each in launch.plan.actions if each.stage != "before"]
        self._limit_s = sum(after) + exit_barrier.MARGIN_S

    @property
    def control_channel(self) -> ControlChannel:
        """The connections to the nodes that have come."""
        if self._channel is None:
            connections = {rank: peer.stream for rank, peer in self.kept.items()}
            self._channel = ControlChannel(connections, {rank: peer.host for rank, peer in self.kept.items()})
        return self._channel

    def _record_loss(self) -> None:
        if self.run is None or self._shape.nnodes == 1:
            return
        with contextlib.suppress(OSError, PrimusError):  # a full disk: all is said, and Slurm notices by itself
            log = EventLog(self.run.events)
            log.append("nodes_left")
            log.close()

    def open_channel(self) -> None:
        """Show the others that this node is alive, which a thread of the connections does."""
        assert self.control_channel

    def leave_job(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Leave together with them; an error that they may not know of is told first, an unforeseen one ends it.

        Node 0 records it: whoever waits for the processes of a lost node, as srun does, need not do so any longer.
        """
        if isinstance(error, PrimusError):
            self.control_channel.send_message(
                ControlMessage(kind="lost", text=error.problem), to=self.control_channel.connected_ranks
            )
        if kind is None or isinstance(error, PrimusError):
            exit_barrier.wait_for_all_nodes(self.control_channel, self._shape.node_rank, self._limit_s)
            self._record_loss()
        else:
            self.control_channel.close()


def _run_head_node(launch: Launch, shape: ClusterLayout, say: Say, nodes: _NodeConnections) -> tuple[Run, RunOutcome]:
    """Node 0, or the only one."""
    learn(_make_environment(launch))
    run = _open_run(launch)
    with run.hold_lock() as is_ours:
        if not is_ours:
            raise PrimusError(
                f"{run.directory} is being executed by another process", "wait for its end, or start another run"
            )
        write_json(run.directory / "plan.json", plan.redact_plan(launch.plan))
        scene = _make_hook_context(launch, shape, run.directory, run, say)
        nodes.run = run
        begun = _PendingLaunch(launch, run)
        try:
            _prepare_node(begun, scene, nodes)
            _wait_for_nodes(begun, run, shape, nodes)
            outcome = _run_workers(
                _make_session(begun.launch, run, nodes.control_channel, say, keeps_record=True), begun.launch, say
            )
        except PrimusError as error:
            nodes.open_channel()
            _finish_run(begun.launch, scene, runner.outcome_of(error), run)
            raise
        _finish_run(begun.launch, scene, outcome, run)
        return run, outcome


def _run_other_node(launch: Launch, shape: ClusterLayout, say: Say, nodes: _NodeConnections) -> tuple[Run, RunOutcome]:
    """Another node: do what comes before, meet node 0, then work in the run folder that it names."""
    private = Path(tempfile.mkdtemp(prefix="primus-node-"))
    run_folder.write_files(private, launch.job)
    scene = _make_hook_context(launch, shape, private, None, say)
    begun = _PendingLaunch(launch, None)
    try:
        _prepare_node(begun, scene, nodes)
        launch = _join_run(begun, shape, nodes)
    except PrimusError as error:
        nodes.open_channel()
        _run_after_hooks(begun.launch, scene, runner.outcome_of(error), None)
        if not any(scene.logs.glob("*.log")):
            shutil.rmtree(private)
        raise
    run = _open_run(launch)
    _move_files(private, run.directory, shape)
    shutil.rmtree(private)
    scene = _make_hook_context(launch, shape, run.directory, run, say)
    with run.hold_lock() as is_ours:
        try:
            outcome = _run_workers(
                _make_session(launch, run, nodes.control_channel, say, keeps_record=is_ours), launch, say
            )
        except PrimusError as error:
            _finish_run(launch, scene, runner.outcome_of(error), run, keeps_record=is_ours)
            raise
        _finish_run(launch, scene, outcome, run, keeps_record=is_ours)
        return run, outcome


class _PendingLaunch:
    """A launch while the hooks and patches that come before it change it."""

    def __init__(self, launch: Launch, run: Run | None) -> None:
        self.launch = launch
        self.alike = launch
        """Without what is set once for all nodes: what each node must have found for itself."""
        self.env: dict[str, Variable] = {}
        """What is set once for all nodes."""
        self.extra: tuple[str, ...] = ()
        self._run = run
        self._nnodes = launch.plan.layout.nnodes if launch.plan.layout else 1

    def accept_result(self, given: HookResult) -> list[str]:
        """Take what a hook or patch wants set; gives what is to be said about it.

        Raises:
            UsageError: It cannot be.
        """
        self.launch = amend_launch(self.launch, given.env, given.extra)
        remarks = self._share_settings(given) if self._nnodes > 1 else []
        if self._run and given.extra and not self.launch.job.resume:
            run_folder.write_files(self._run.directory, self.launch.job)
        found, environ = self.launch.plan.env, _make_environment(self.launch)
        kept = [name for name, each in given.env.items() if environ.get(name) != each.value]
        return remarks + [f"{name} stays as {_describe_source(found.get(name))} has set it" for name in kept]

    def _share_settings(self, given: HookResult) -> list[str]:
        """Keep apart what was set once for all nodes."""
        if not given.action.once:
            self.alike = amend_launch(self.alike, given.env, given.extra)
            return []
        secrets = [name for name, each in given.env.items() if is_secret_name(name) or each.is_secret]
        self.env |= {name: each for name, each in given.env.items() if name not in secrets}
        self.extra += given.extra
        return [f"{', '.join(secrets)} is a secret, and stays on this node"] if secrets else []


def _describe_source(variable: Variable | None) -> str:
    return variable.source if variable else "the shell"


def _prepare_node(begun: _PendingLaunch, scene: HookContextFacts, nodes: _NodeConnections) -> None:
    """Check this node, and perform the hooks and patches that come before the workers; all nodes learn of a failure.

    Raises:
        PrimusError: This node is not fit, or a hook or patch has failed.
    """
    launch, shape = begun.launch, scene.layout
    try:
        launch.job.check_node(shape)
        if launch.plan.actions:
            runner.run_before_hooks(
                launch.plan.actions, scene, lambda: _make_environment(begun.launch), begun.accept_result
            )
    except PrimusError as error:
        if shape.nnodes > 1:
            scene.say(f"{error.problem}; telling the other nodes")
            _report_error(error, launch, shape, nodes)
        raise


def _report_error(error: PrimusError, launch: Launch, shape: ClusterLayout, nodes: _NodeConnections) -> None:
    assert shape.master_port is not None
    reason = f"node {shape.node_rank} ({socket.gethostname()}): {error.problem}"
    if shape.node_rank == 0:
        rendezvous.abort_rendezvous(shape.master_port, shape.nnodes, reason, error.exit_code, nodes.kept)
        return
    with contextlib.suppress(PrimusError):  # what this node failed of is the better message
        place = (shape.master_addr, shape.master_port, shape.node_rank)
        rendezvous.abort_join(*place, reason, error.exit_code, _patience_s(launch), nodes.kept)


def _patience_s(launch: Launch) -> float:
    """Seconds that nodes wait for each other: starting them by hand, and what each of them does before.

    Of hooks with long limits, such as a folder of AMD-AGI/Primus, only one counts in full: nodes do not wait for a node
    that is gone as long as all hooks together might take.
    """
    limits = sorted(each.timeout_s for each in launch.plan.actions if each.stage == "before")
    return RENDEZVOUS_TIMEOUT_S + sum(limits[-1:]) + sum(min(limit, discovery.TIMEOUT_S) for limit in limits[:-1])


def _finish_run(
    launch: Launch, scene: HookContextFacts, outcome: RunOutcome, run: Run, *, keeps_record: bool = True
) -> None:
    """Record how the run has ended, and perform the hooks that come after it."""
    if keeps_record:
        run.update_metadata(
            ended=time.time(), outcome=outcome
        )  # before the event: whoever waits for that finds the outcome
        log = EventLog(run.events)
        values = {"state": outcome.state, "exit_code": outcome.exit_code, "reason": outcome.reason}
        newest = max(launch.attempt, run.read_metadata().attempts - 1)
        log.append("run_ended", attempt=newest, **values)
        log.close()
    _run_after_hooks(launch, scene, outcome, run)


def _run_after_hooks(launch: Launch, scene: HookContextFacts, outcome: RunOutcome, run: Run | None) -> None:
    """Perform the hooks that come after the workers, and record those that fail."""
    if not launch.plan.actions:
        return
    problems = runner.run_after_hooks(launch.plan.actions, scene, _make_environment(launch), outcome)
    if run and problems:
        log = EventLog(run.events)
        for problem in problems:
            log.append("hook_failed", node_rank=scene.layout.node_rank, problem=problem)
        log.close()


def _run_workers(crew: NodeSession, launch: Launch, say: Say) -> RunOutcome:
    """Run the workers until their end, unless a hook or the user asks for none."""
    if _make_environment(launch).get(SKIP_VARIABLE) != "1":
        return attempt_loop.supervise_attempts(crew, launch)
    reason = (
        f"no workers were started: {SKIP_VARIABLE}=1, set by {_describe_source(launch.plan.env.get(SKIP_VARIABLE))}"
    )
    say(reason)
    return RunOutcome(state="done", exit_code=0, reason=reason)


def _make_environment(launch: Launch) -> dict[str, str]:
    """Variables of the workers."""
    return dict(launch.context.environ) | {name: variable.value for name, variable in launch.plan.env.items()}


def _make_hook_context(
    launch: Launch, shape: ClusterLayout, place: Path, run: Run | None, say: Say
) -> HookContextFacts:
    return HookContextFacts(
        task=launch.request.task,
        words=launch.request.words,
        layout=shape,
        python=launch.context.python,
        logs=place / HOOK_LOGS,
        records=place,
        run=run,
        config=place / CONFIG_FILE,
        say=say,
    )


def _move_files(source: Path, target: Path, shape: ClusterLayout) -> None:
    """Take over the logs and records of what was done before the run folder was known; a log is appended to."""
    for file in sorted((source / HOOK_LOGS).glob("*.log")):
        (target / HOOK_LOGS).mkdir(parents=True, exist_ok=True)
        with (target / HOOK_LOGS / file.name).open("ab") as log:
            log.write(file.read_bytes())
    record = Path(patch_records.index_path(shape.node_rank))
    if (source / record).is_file():
        write_text(target / record, (source / record).read_text(encoding="utf-8"))


def _join_run(begun: _PendingLaunch, shape: ClusterLayout, nodes: _NodeConnections) -> Launch:
    """The launch of another node than 0 in the run folder, and with the settings, that node 0 names."""
    assert shape.master_port is not None
    place = (shape.master_addr, shape.master_port, shape.node_rank)
    welcome = rendezvous.join_rendezvous(
        *place, _compute_fingerprint(begun.alike, shape), _patience_s(begun.launch), nodes.kept
    )
    launch = begun.launch
    directory = Path(launch.directory).parent / welcome.run_id
    job = structs.replace(launch.job, resume=str(directory) if directory.exists() else None)
    there = plan_attempt(job, launch.request, launch.command, launch.context, directory, welcome.attempt)
    return amend_launch(there, welcome.env, welcome.extra)


def _compute_fingerprint(launch: Launch, shape: ClusterLayout) -> str:
    """Hash of what must be equal on all nodes: the configuration and the number of processes."""
    digest = hashlib.sha256(f"{shape.nnodes} {shape.nproc} {launch.request.task}".encode())
    for name, text in sorted(launch.job.files.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _open_run(launch: Launch) -> Run:
    """The run folder, with what was asked."""
    directory = Path(launch.directory)
    if launch.job.resume:
        return Run(directory)
    return run_folder.make_run_folder(directory, launch.job, launch.request, launch.command)


def _write_plan(launch: Launch, run: Run, shape: ClusterLayout) -> None:
    """This attempt's plan, on its own and at the head of what the launcher says."""
    if shape.node_rank == 0:
        write_json(run.directory / "plan.json", plan.redact_plan(launch.plan))
    log = worker_processes.launch_log(run, launch.plan)
    log.parent.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with log.open("a", encoding="utf-8", errors="surrogateescape") as file:
        text = f"[{now}] attempt {launch.attempt} on {socket.gethostname()}\n{show.format_plan(launch.plan)}\n"
        file.write(redact(text))


def _wait_for_nodes(begun: _PendingLaunch, run: Run, shape: ClusterLayout, nodes: _NodeConnections) -> None:
    """Node 0 waits for the others, and tells them the run and what was set for all."""
    if shape.nnodes == 1:
        return
    assert shape.master_port is not None
    host = socket.gethostname()
    welcome = rendezvous.JoinReply(run.id, begun.launch.attempt, env=begun.env, extra=begun.extra, host=host)
    patience_s = _patience_s(begun.launch)
    rendezvous.lead_rendezvous(
        shape.master_port, shape.nnodes, welcome, _compute_fingerprint(begun.alike, shape), patience_s, nodes.kept
    )


def _make_session(launch: Launch, run: Run, channel: ControlChannel, say: Say, *, keeps_record: bool) -> NodeSession:
    """How attempts are done on this node; of the nodes that share a run folder, one keeps the record."""

    def perform(attempt: Launch, guard: AttemptMonitor) -> NodeResult:
        _begin_attempt(attempt, run, say, keeps_record=keeps_record)
        after_start = partial(_keep_environment, attempt, run)
        return worker_processes.run_worker_processes(
            attempt.plan, run, attempt.attempt, launch.context.environ, after_start, guard
        )

    return NodeSession(run=run, channel=channel, say=say, perform=perform, environ=launch.context.environ)


def _begin_attempt(launch: Launch, run: Run, say: Say, *, keeps_record: bool) -> None:
    """Write the plan of an attempt, and that it begins."""
    shape = launch.plan.layout
    assert shape
    _write_plan(launch, run, shape)
    if shape.node_rank == 0:
        say(f"{'continuing' if launch.attempt else 'run'} {os.path.relpath(run.directory)}")
    if keeps_record:
        run.update_metadata(
            started=time.time(), ended=None, attempts=launch.attempt + 1, outcome=RunOutcome(state="running")
        )


def _keep_environment(launch: Launch, run: Run) -> None:
    """Write what the workers are started with, and on which machine."""
    shape, variables = launch.plan.layout, launch.plan.env
    assert shape
    sources = {name: variable.source for name, variable in variables.items()}
    hidden = {name: MASK for name, variable in variables.items() if variable.is_secret}
    place = run.directory / ("env" if shape.node_rank == 0 else f"env/node_{shape.node_rank}")
    facts = launch.context.facts(shape.master_addr if shape.nnodes > 1 else None)  # as they were planned with
    snapshot.write_environment(place, _make_environment(launch) | hidden, sources, facts)

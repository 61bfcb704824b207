"""Run a prepared job on this node: create or continue its run folder, execute the plan, record the outcome.

    node 0    run folder -> checks, hooks `before` -> rendezvous -> attempts -> record, hooks `after` -> exit barrier
    node k    private folder -> checks, hooks ---> rendezvous -> run folder -> attempts -> hooks `after` -> exit barrier

Another node than 0 does not know the run folder before the rendezvous: until then its logs are in a private folder. A
node that fails before the rendezvous still joins it, to report the failure to all others. Where nodes share the run
folder, the lock decides which one keeps the record.
"""

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

from primus.engines.installation import find_environment, list_installation_folders
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
from primus.site_folders import list_package_versions

RENDEZVOUS_TIMEOUT_S = 600.0
"""Time for all nodes to join, without that of hooks: nodes may be started manually, or pull an image first."""
ENGINE_INSTALL_S = 1800.0
"""Time for the environment of an engine that is not installed: nodes may download it, or wait for one that does."""
HOOK_LOGS = "logs/hooks"
CONFIG_FILE = "config/primus_config.yaml"

Say = Callable[[str], None]
SKIP_VARIABLE = "PRIMUS_SKIP_MAIN_LAUNCH"
"""Set to 1 by a hook that does the whole job, such as the offline GEMM tuning of AMD-AGI/Primus: no workers start."""


def run_node(launch: Launch, say: Say, leaving: ExitStack) -> tuple[Run, RunOutcome]:
    """Execute a prepared launch and record it; gives its run folder and outcome.

    Args:
        launch: What is executed.
        say: Prints a line.
        leaving: Closed by the caller after its last output; then the nodes of the job exit together.

    Raises:
        PrimusError: The launcher itself or a hook fails; a failing worker is an outcome.
    """
    shape = launch.plan.layout
    assert shape is not None
    # Connections exist from here on, so that a failure before the rendezvous can still be sent to the other nodes.
    nodes = _NodeConnections(launch, shape)
    leaving.push(nodes.leave_job)  # also after an error: other nodes wait for this one
    if shape.node_rank > 0:
        return _run_other_node(launch, shape, say, nodes)
    if shape.master_port is not None:
        # Only node 0 listens. Checked first: this takes milliseconds, and the hooks that follow may take an hour.
        rendezvous.check_port_free(shape.master_port)
    return _run_head_node(launch, shape, say, nodes)


class _NodeConnections:
    """Connections to the other nodes of the job, from the rendezvous to the exit barrier."""

    def __init__(self, launch: Launch, shape: ClusterLayout) -> None:
        self.kept: dict[int, RendezvousPeer] = {}
        """Filled by the rendezvous."""
        self.run: Run | None = None
        """Set on node 0."""
        self._shape = shape
        self._channel: ControlChannel | None = None
        # Hooks after the workers may use their whole time limits before a node reaches the exit barrier.
        after = [each.timeout_s for each in launch.plan.actions if each.stage != "before"]
        self._limit_s = sum(after) + exit_barrier.MARGIN_S

    @property
    def control_channel(self) -> ControlChannel:
        """The channel to the nodes that have joined; made on first use, which ends the rendezvous."""
        if self._channel is None:
            connections = {rank: peer.stream for rank, peer in self.kept.items()}
            self._channel = ControlChannel(connections, {rank: peer.host for rank, peer in self.kept.items()})
        return self._channel

    def _record_release(self) -> None:
        if self.run is None or self._shape.nnodes == 1:
            return
        with contextlib.suppress(OSError, PrimusError):  # a full disk: Slurm notices by itself
            log = EventLog(self.run.events)
            log.append("nodes_left")
            log.close()

    def open_channel(self) -> None:
        """Start the thread that sends "alive" to the other nodes each second while hooks run."""
        assert self.control_channel

    def leave_job(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Exit together with the other nodes, after sending them an error of this one; at an unexpected error, at once.

        Node 0 records it as an event: a wrapper that waits for the processes of a lost node, as srun does, may stop.
        """
        if isinstance(error, PrimusError):
            self.control_channel.send_message(
                ControlMessage(kind="lost", text=error.problem), to=self.control_channel.connected_ranks
            )
        if kind is None or isinstance(error, PrimusError):
            exit_barrier.wait_for_all_nodes(self.control_channel, self._shape.node_rank, self._limit_s)
            self._record_release()
        else:
            # An unexpected error: this node leaves at once, and the others see its connection end.
            self.control_channel.close()


def _run_head_node(launch: Launch, shape: ClusterLayout, say: Say, nodes: _NodeConnections) -> tuple[Run, RunOutcome]:
    """Node 0, or the only one."""
    # Before the run folder exists: none of its files may contain a secret of the workers.
    learn(_make_environment(launch))
    run = _open_run(launch)
    with run.hold_lock() as is_ours:
        if not is_ours:
            raise PrimusError(
                f"{run.directory} is being executed by another process", "wait until it has ended, or start a new run"
            )
        # Again before each attempt; written here for readers that look while hooks run.
        write_json(run.directory / "plan.json", plan.redact_plan(launch.plan))
        context = _make_hook_context(launch, shape, run.directory, run, say)
        nodes.run = run
        pending = _PendingLaunch(launch, run)
        try:
            _prepare_node(pending, context, nodes)
            _wait_for_nodes(pending, run, shape, nodes)
            outcome = _run_workers(
                _make_session(pending.launch, run, nodes.control_channel, say, keeps_record=True), pending.launch, say
            )
        except PrimusError as error:
            # Hooks after a failure may take long; without the channel, the other nodes would time this one out.
            nodes.open_channel()
            _finish_run(pending.launch, context, runner.outcome_of(error), run)
            raise
        _finish_run(pending.launch, context, outcome, run)
        return run, outcome


def _run_other_node(launch: Launch, shape: ClusterLayout, say: Say, nodes: _NodeConnections) -> tuple[Run, RunOutcome]:
    """Another node: check it and run its hooks, join node 0, then work in the run folder that node 0 names."""
    # On the local disk: the name of the run folder is known only after the rendezvous.
    private = Path(tempfile.mkdtemp(prefix="primus-node-"))
    run_folder.write_files(private, launch.job)
    context = _make_hook_context(launch, shape, private, None, say)
    pending = _PendingLaunch(launch, None)
    try:
        _prepare_node(pending, context, nodes)
        launch = _join_run(pending, shape, nodes)
    except PrimusError as error:
        nodes.open_channel()
        _run_after_hooks(pending.launch, context, runner.outcome_of(error), None)
        if not any(context.logs.glob("*.log")):  # logs of hooks are kept here, without a run folder
            shutil.rmtree(private)
        raise
    run = _open_run(launch)
    # Before the workers start, so that readers of the run folder find the logs of the hooks there.
    _move_files(private, run.directory, shape)
    shutil.rmtree(private)
    context = _make_hook_context(launch, shape, run.directory, run, say)
    # Nodes may share the folder: the one that holds the lock keeps the record, usually node 0.
    with run.hold_lock() as is_ours:
        try:
            outcome = _run_workers(
                _make_session(launch, run, nodes.control_channel, say, keeps_record=is_ours), launch, say
            )
        except PrimusError as error:
            _finish_run(launch, context, runner.outcome_of(error), run, keeps_record=is_ours)
            raise
        _finish_run(launch, context, outcome, run, keeps_record=is_ours)
        return run, outcome


class _PendingLaunch:
    """A launch while hooks and patches before the workers change it."""

    def __init__(self, launch: Launch, run: Run | None) -> None:
        self.launch = launch
        self.per_node = launch
        """The launch without settings that are made once for all nodes: every node must arrive at the same one."""
        self.env: dict[str, Variable] = {}
        """Variables that are set once for all nodes."""
        self.extra: tuple[str, ...] = ()
        """Arguments that are added once for all nodes."""
        self._run = run
        self._nnodes = launch.plan.layout.nnodes if launch.plan.layout else 1

    def accept_result(self, given: HookResult) -> list[str]:
        """Apply the settings of a hook or patch; gives remarks to print.

        Raises:
            UsageError: It is invalid.
        """
        # At once, because the next hook sees the variables of this one.
        self.launch = amend_launch(self.launch, given.env, given.extra)
        remarks = self._share_settings(given) if self._nnodes > 1 else []
        if self._run and given.extra and not self.launch.job.resume:
            run_folder.write_files(self._run.directory, self.launch.job)
        found, environ = self.launch.plan.env, _make_environment(self.launch)
        kept = [name for name, each in given.env.items() if environ.get(name) != each.value]
        return remarks + [f"{name} keeps the value of {_describe_source(found.get(name))}" for name in kept]

    def _share_settings(self, given: HookResult) -> list[str]:
        """Collect settings that are made once for all nodes: node 0 sends them in the rendezvous."""
        if not given.action.once:
            self.per_node = amend_launch(self.per_node, given.env, given.extra)
            return []
        secrets = [name for name, each in given.env.items() if is_secret_name(name) or each.is_secret]
        self.env |= {name: each for name, each in given.env.items() if name not in secrets}
        self.extra += given.extra
        return [f"{', '.join(secrets)}: a secret is not sent to other nodes"] if secrets else []


def _describe_source(variable: Variable | None) -> str:
    return variable.source if variable else "the shell"


def _prepare_node(pending: _PendingLaunch, context: HookContextFacts, nodes: _NodeConnections) -> None:
    """Check this node, and run the hooks and patches before the workers; reports a failure to all nodes.

    Raises:
        PrimusError: This node is unfit, or a hook or patch failed.
    """
    launch, shape = pending.launch, context.layout
    try:
        _prepare_engine(launch, shape, context.say)
        launch.job.check_node(shape)
        if launch.plan.actions:
            runner.run_before_hooks(
                launch.plan.actions, context, lambda: _make_environment(pending.launch), pending.accept_result
            )
    except PrimusError as error:
        if shape.nnodes > 1:
            context.say(f"{error.problem}; reporting it to the other nodes")
            _report_error(error, launch, shape, nodes)
        raise


def _prepare_engine(launch: Launch, shape: ClusterLayout, say: Say) -> None:
    """Make the environment of the engine if it is not installed, and print which one the workers use.

    Raises:
        UnfitError: It cannot be installed.
    """
    engine = launch.engine
    if engine is None:
        return
    if engine.installation is not None:
        if shape.node_rank == 0:
            say(engine.note)
        return
    from primus.engines.environment import make_environment

    made = make_environment(engine.name, engine.requirement, _make_environment(launch), say)
    say(f"{engine.requirement.title} {made.version} {made.format_place()}")


def _report_error(error: PrimusError, launch: Launch, shape: ClusterLayout, nodes: _NodeConnections) -> None:
    assert shape.master_port is not None
    reason = f"node {shape.node_rank} ({socket.gethostname()}): {error.problem}"
    if shape.node_rank == 0:
        rendezvous.abort_rendezvous(shape.master_port, shape.nnodes, reason, error.exit_code, nodes.kept)
        return
    with contextlib.suppress(PrimusError):  # the failure of this node is the better message
        head = (shape.master_addr, shape.master_port, shape.node_rank)
        rendezvous.abort_join(*head, reason, error.exit_code, _rendezvous_timeout_s(launch), nodes.kept)


def _rendezvous_timeout_s(launch: Launch) -> float:
    """Seconds that nodes wait for each other: for the start of all of them, a missing engine, and their hooks.

    Of hooks with long limits, such as a folder of AMD-AGI/Primus, only one counts in full: a missing node must not
    block the others for as long as all hooks together may take.
    """
    install_s = ENGINE_INSTALL_S if launch.engine and launch.engine.installation is None else 0.0
    limits = sorted(each.timeout_s for each in launch.plan.actions if each.stage == "before")
    return (
        RENDEZVOUS_TIMEOUT_S
        + install_s
        + sum(limits[-1:])
        + sum(min(limit, discovery.TIMEOUT_S) for limit in limits[:-1])
    )


def _finish_run(
    launch: Launch, context: HookContextFacts, outcome: RunOutcome, run: Run, *, keeps_record: bool = True
) -> None:
    """Record the outcome, and run the hooks after the workers."""
    if keeps_record:
        # Before the event: a reader that waits for the event finds the outcome.
        run.update_metadata(ended=time.time(), outcome=outcome)
        log = EventLog(run.events)
        values = {"state": outcome.state, "exit_code": outcome.exit_code, "reason": outcome.reason}
        # The attempt of this start, or the last restart in it.
        newest = max(launch.attempt, run.read_metadata().attempts - 1)
        log.append("run_ended", attempt=newest, **values)
        log.close()
    _run_after_hooks(launch, context, outcome, run)


def _run_after_hooks(launch: Launch, context: HookContextFacts, outcome: RunOutcome, run: Run | None) -> None:
    """Run the hooks after the workers, and record those that fail."""
    if not launch.plan.actions:
        return
    problems = runner.run_after_hooks(launch.plan.actions, context, _make_environment(launch), outcome)
    if run and problems:
        log = EventLog(run.events)
        for problem in problems:
            log.append("hook_failed", node_rank=context.layout.node_rank, problem=problem)
        log.close()


def _run_workers(session: NodeSession, launch: Launch, say: Say) -> RunOutcome:
    """Run the workers until they have ended, unless a hook or the user skips them."""
    if _make_environment(launch).get(SKIP_VARIABLE) != "1":
        return attempt_loop.supervise_attempts(session, launch)
    reason = f"no workers started: {SKIP_VARIABLE}=1, set by {_describe_source(launch.plan.env.get(SKIP_VARIABLE))}"
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
    """Move logs and records of the private folder to the run folder; a log that exists there is appended to."""
    for file in sorted((source / HOOK_LOGS).glob("*.log")):
        (target / HOOK_LOGS).mkdir(parents=True, exist_ok=True)
        with (target / HOOK_LOGS / file.name).open("ab") as log:
            log.write(file.read_bytes())
    record = Path(patch_records.index_path(shape.node_rank))
    if (source / record).is_file():
        write_text(target / record, (source / record).read_text(encoding="utf-8"))


def _join_run(pending: _PendingLaunch, shape: ClusterLayout, nodes: _NodeConnections) -> Launch:
    """The launch of another node in the run folder and with the settings that node 0 sends."""
    assert shape.master_port is not None
    head = (shape.master_addr, shape.master_port, shape.node_rank)
    reply = rendezvous.join_rendezvous(
        *head, _compute_fingerprint(pending.per_node, shape), _rendezvous_timeout_s(pending.launch), nodes.kept
    )
    # Planned again in that folder; then the settings that node 0 made for all nodes are applied.
    launch = pending.launch
    directory = Path(launch.directory).parent / reply.run_id
    # On a shared file system node 0 has created the folder; otherwise this node creates one with the same name.
    job = structs.replace(launch.job, resume=str(directory) if directory.exists() else None)
    there = plan_attempt(job, launch.request, launch.command, launch.context, directory, reply.attempt)
    return amend_launch(there, reply.env, reply.extra)


def _compute_fingerprint(launch: Launch, shape: ClusterLayout) -> str:
    """Hash of what must be equal on all nodes: the configuration and the number of processes."""
    # Not the hosts, devices or variables: nodes of one job may differ in them.
    # Names and texts are separated by NUL, so that different files cannot give the same bytes.
    digest = hashlib.sha256(f"{shape.nnodes} {shape.nproc} {launch.request.task}".encode())
    for name, text in sorted(launch.job.files.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _open_run(launch: Launch) -> Run:
    """The run folder, with the request."""
    directory = Path(launch.directory)
    if launch.job.resume:
        return Run(directory)
    return run_folder.make_run_folder(directory, launch.job, launch.request, launch.command)


def _write_plan(launch: Launch, run: Run, shape: ClusterLayout) -> None:
    """Write this attempt's plan to its file, and to the head of the launcher's log."""
    if shape.node_rank == 0:
        write_json(run.directory / "plan.json", plan.redact_plan(launch.plan))
    log = worker_processes.launch_log(run, launch.plan)
    log.parent.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with log.open("a", encoding="utf-8", errors="surrogateescape") as file:
        text = f"[{now}] attempt {launch.attempt} on {socket.gethostname()}\n{show.format_plan(launch.plan)}\n"
        file.write(redact(text))


def _wait_for_nodes(pending: _PendingLaunch, run: Run, shape: ClusterLayout, nodes: _NodeConnections) -> None:
    """Node 0: wait for the others, and send them the run and the settings for all nodes."""
    if shape.nnodes == 1:
        return
    assert shape.master_port is not None
    host = socket.gethostname()
    reply = rendezvous.JoinReply(run.id, pending.launch.attempt, env=pending.env, extra=pending.extra, host=host)
    timeout_s = _rendezvous_timeout_s(pending.launch)
    rendezvous.lead_rendezvous(
        shape.master_port, shape.nnodes, reply, _compute_fingerprint(pending.per_node, shape), timeout_s, nodes.kept
    )


def _make_session(launch: Launch, run: Run, channel: ControlChannel, say: Say, *, keeps_record: bool) -> NodeSession:
    """Build the session that runs attempts on this node; of the nodes that share a run folder, one keeps the record."""

    def run_node_attempt(attempt: Launch, monitor: AttemptMonitor) -> NodeResult:
        _start_attempt(attempt, run, say, keeps_record=keeps_record)
        after_start = partial(_keep_environment, attempt, run)
        return worker_processes.run_worker_processes(
            attempt.plan, run, attempt.attempt, launch.context.environ, after_start, monitor
        )

    return NodeSession(
        run=run, channel=channel, say=say, run_node_attempt=run_node_attempt, environ=launch.context.environ
    )


def _start_attempt(launch: Launch, run: Run, say: Say, *, keeps_record: bool) -> None:
    """Record the plan and the start of an attempt."""
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
    """Record the environment of the workers, and their machine."""
    shape, variables = launch.plan.layout, launch.plan.env
    assert shape
    sources = {name: variable.source for name, variable in variables.items()}
    hidden = {name: MASK for name, variable in variables.items() if variable.is_secret}
    place = run.directory / ("env" if shape.node_rank == 0 else f"env/node_{shape.node_rank}")
    facts = launch.context.facts(shape.master_addr if shape.nnodes > 1 else None)  # the facts of the plan
    engine, environ = launch.engine, _make_environment(launch)
    installation = engine and (engine.installation or find_environment(engine.name, engine.requirement, environ))
    packages = list_package_versions(list_installation_folders(installation)) if installation else None
    snapshot.write_environment(place, environ | hidden, sources, facts, packages)
    if installation:
        write_json(place / "engine.json", installation)

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
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from primus.errors import PrimusError
from primus.launch import run_folder
from primus.launch.hooks import discovery, runner
from primus.launch.hooks.runner import HookContextFacts, HookResult
from primus.launch.node_connections import NodeConnections
from primus.launch.nodes import rendezvous
from primus.launch.prepare import Launch, amend_launch, plan_attempt
from primus.launch.run_folder import HOOK_LOGS, move_node_files, open_run
from primus.launch.supervision import attempt_loop
from primus.launch.supervision.attempt_loop import NodeSession
from primus.machine.cluster import ClusterLayout, find_node_name
from primus.messages import Say
from primus.plan import Variable, redact_plan
from primus.redaction import is_secret_name, learn
from primus.runs.events import EventLog
from primus.runs.files import write_json
from primus.runs.store import Run, RunOutcome
from primus.runtime import PROGRESS_VARIABLE

if TYPE_CHECKING:
    from primus.engines.choice import EngineChoice

RENDEZVOUS_TIMEOUT_S = 600.0
"""Time for all nodes to join, without that of hooks: nodes may be started manually, or pull an image first."""
CONFIG_FILE = "config/primus_config.yaml"

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
    nodes = NodeConnections(layout=shape, actions=launch.plan.actions)
    leaving.push(nodes.leave_job)  # also after an error: other nodes wait for this one
    if shape.node_rank > 0:
        return _run_other_node(launch, shape, say, nodes)
    if shape.master_port is not None:
        # Only node 0 listens. Checked first: this takes milliseconds, and the hooks that follow may take an hour.
        rendezvous.check_port_free(shape.master_port)
    return _run_head_node(launch, shape, say, nodes, leaving)


def _run_head_node(
    launch: Launch, shape: ClusterLayout, say: Say, nodes: NodeConnections, leaving: ExitStack
) -> tuple[Run, RunOutcome]:
    """Node 0, or the only one."""
    # Before the run folder exists: none of its files may contain a secret of the workers.
    learn(launch.make_environ())
    run = open_run(launch)
    with run.hold_lock() as is_ours:
        if not is_ours:
            raise PrimusError(
                f"{run.directory} is being executed by another process", "wait until it has ended, or start a new run"
            )
        if launch.plan.actions:  # each attempt writes its plan; a reader may look while hooks run
            write_json(run.directory / "plan.json", redact_plan(launch.plan))
        context = _make_hook_context(launch, shape, run.directory, run, say)
        nodes.run = run
        pending = _PendingLaunch(launch, run)
        try:
            # Closed after the run is recorded and its last hooks have run, so that observers see how it ended.
            if launch.job.observe:
                leaving.enter_context(launch.job.observe(run, launch.context.environ, say))
            _prepare_node(pending, context, nodes)
            if shape.nnodes > 1:
                _wait_for_nodes(pending, run, shape, nodes, say)
                _report_unfit_nodes(run, nodes, launch, say)
            launch = pending.launch
            session = NodeSession(run=run, nodes=nodes, say=say, environ=launch.context.environ, keeps_record=True)
            outcome = _run_workers(session, launch)
        except PrimusError as error:
            # Hooks after a failure may take long; without the channel, the other nodes would time this one out.
            nodes.open_channel()
            _finish_run(pending.launch, context, runner.build_failure_outcome(error), run)
            raise
        _finish_run(pending.launch, context, outcome, run)
        return run, outcome


def _run_other_node(launch: Launch, shape: ClusterLayout, say: Say, nodes: NodeConnections) -> tuple[Run, RunOutcome]:
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
        _run_after_hooks(pending.launch, context, runner.build_failure_outcome(error), None)
        if not any(context.logs.glob("*.log")):  # logs of hooks are kept here, without a run folder
            shutil.rmtree(private)
        raise
    run = open_run(launch)
    joined_as, shape = shape, launch.plan.layout or shape
    # Before the workers start, so that readers of the run folder find the logs of the hooks there.
    move_node_files(private, run.directory, joined_as.node_rank, shape.node_rank)
    shutil.rmtree(private)
    context = _make_hook_context(launch, shape, run.directory, run, say)
    # Nodes may share the folder: the one that holds the lock keeps the record, usually node 0.
    with run.hold_lock() as is_ours:
        try:
            session = NodeSession(run=run, nodes=nodes, say=say, environ=launch.context.environ, keeps_record=is_ours)
            outcome = _run_workers(session, launch)
        except PrimusError as error:
            _finish_run(launch, context, runner.build_failure_outcome(error), run, keeps_record=is_ours)
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

    def make_environment(self, engine: EngineChoice, say: Say) -> None:
        """Make the environment of `engine` if the plan has that action, and print which one the workers use.

        Raises:
            UnfitError: It cannot be made.
        """
        layout = self.launch.plan.layout
        if engine.installation is not None:
            if layout and layout.node_rank == 0:
                say(engine.note)
            return
        from primus.engines.environment import make_environment  # takes pip and its settings

        made = make_environment(engine.name, engine.requirement, self.launch.make_environ(), say)
        say(f"{engine.requirement.title} {made.version} {made.format_place()}")
        engine = structs.replace(engine, installation=made)
        self.launch, self.per_node = (structs.replace(each, engine=engine) for each in (self.launch, self.per_node))

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
        found, environ = self.launch.plan.env, self.launch.make_environ()
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


def _prepare_node(pending: _PendingLaunch, context: HookContextFacts, nodes: NodeConnections) -> None:
    """Check this node, and run the hooks and patches before the workers; reports a failure to all nodes.

    Raises:
        PrimusError: This node is unfit, or a hook or patch failed.
    """
    launch, shape = pending.launch, context.layout
    try:
        if launch.engine:
            pending.make_environment(launch.engine, context.say)
        launch.job.check_node(shape)
        if launch.plan.actions:
            runner.run_before_hooks(
                launch.plan.actions, context, lambda: pending.launch.make_environ(), pending.accept_result
            )
        pending.launch.job.check_files()
    except PrimusError as error:
        if shape.nnodes > 1:
            context.say(f"{error.problem}; reporting it to the other nodes")
            _report_error(error, launch, shape, nodes)
        raise


def _report_error(error: PrimusError, launch: Launch, shape: ClusterLayout, nodes: NodeConnections) -> None:
    assert shape.master_port is not None
    reason = f"node {shape.node_rank} ({find_node_name()}): {error.problem}"
    if shape.node_rank == 0:
        rendezvous.abort_rendezvous(shape.master_port, shape.nnodes, reason, error.exit_code, nodes.kept)
        return
    with contextlib.suppress(PrimusError):  # the failure of this node is the better message
        head = rendezvous.HeadAddress(shape.master_addr, shape.master_port)
        timeout_s = _choose_rendezvous_timeout_s(launch)
        rendezvous.abort_join(head, shape.node_rank, reason, error.exit_code, timeout_s, nodes.kept)


def _choose_rendezvous_timeout_s(launch: Launch) -> float:
    """Seconds that nodes wait for each other: for the start of all of them, a missing engine, and their hooks.

    Of hooks with long limits, such as a folder of AMD-AGI/Primus, only one counts in full: a missing node must not
    block the others for as long as all hooks together may take.
    """
    before = [each for each in launch.plan.actions if each.stage == "before"]
    limits = sorted(each.timeout_s for each in before if each.kind != "environment")
    return (
        RENDEZVOUS_TIMEOUT_S
        + sum(each.timeout_s for each in before if each.kind == "environment")
        + sum(limits[-1:])
        + sum(min(limit, discovery.TIMEOUT_S) for limit in limits[:-1])
    )


def _finish_run(
    launch: Launch, context: HookContextFacts, outcome: RunOutcome, run: Run, *, keeps_record: bool = True
) -> None:
    """Record the outcome, and run the hooks after the workers."""
    if keeps_record:
        if run.read_metadata().started is None and not launch.job.resume:
            run_folder.record_revision(run)
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
    problems = runner.run_after_hooks(launch.plan.actions, context, launch.make_environ(), outcome)
    if run and problems:
        log = EventLog(run.events)
        for problem in problems:
            log.append("hook_failed", node_rank=context.layout.node_rank, problem=problem)
        log.close()


def _run_workers(session: NodeSession, launch: Launch) -> RunOutcome:
    """Run the workers until they have ended, unless a hook or the user skips them."""
    if launch.make_environ().get(SKIP_VARIABLE) != "1":
        with _post_progress(session, launch):
            return attempt_loop.supervise_attempts(session, launch)
    reason = f"no workers started: {SKIP_VARIABLE}=1, set by {_describe_source(launch.plan.env.get(SKIP_VARIABLE))}"
    session.say(reason)
    return RunOutcome(state="done", exit_code=0, reason=reason)


def _post_progress(session: NodeSession, launch: Launch) -> contextlib.AbstractContextManager[None]:
    """While open, node 0 posts the progress of the run if the runtime around it asks for that."""
    is_first = launch.plan.layout is not None and launch.plan.layout.node_rank == 0
    if not (is_first and launch.context.environ.get(PROGRESS_VARIABLE)):
        return contextlib.nullcontext()
    from primus.launch import progress_posts  # most runs are posted nowhere

    return progress_posts.post_by_variable(session.run, launch.context.environ, session.say)


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


def _join_run(pending: _PendingLaunch, shape: ClusterLayout, nodes: NodeConnections) -> Launch:
    """The launch of another node in the run folder and with the settings that node 0 sends."""
    assert shape.master_port is not None
    head = rendezvous.HeadAddress(shape.master_addr, shape.master_port)
    fingerprint, timeout_s = _compute_fingerprint(pending.per_node, shape), _choose_rendezvous_timeout_s(pending.launch)
    from primus.launch.node_order import find_own_place  # for jobs of several nodes only

    place = find_own_place(pending.launch)
    reply = rendezvous.join_rendezvous(head, shape.node_rank, fingerprint, timeout_s, nodes.kept, place)
    # Planned again in that folder; then the settings that node 0 made for all nodes are applied.
    launch = pending.launch
    directory = Path(launch.directory).parent / reply.run_id
    # On a shared file system node 0 has created the folder; otherwise this node creates one with the same name.
    job = structs.replace(launch.job, resume=str(directory) if directory.exists() else None)
    context = structs.replace(launch.context, node_rank=reply.node_rank)
    there = plan_attempt(
        structs.replace(launch, job=job, directory=str(directory), attempt=reply.attempt, context=context)
    )
    return amend_launch(there, reply.env, reply.extra)


def _compute_fingerprint(launch: Launch, shape: ClusterLayout) -> str:
    """Hash of what must be equal on all nodes: the configuration and the number of processes."""
    # Not the hosts, devices or variables: nodes of one job may differ in them.
    # Names and texts are separated by NUL, so that different files cannot give the same bytes.
    digest = hashlib.sha256(f"{shape.nnodes} {shape.nproc} {launch.request.task}".encode())
    for name, text in sorted(launch.job.files.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _wait_for_nodes(pending: _PendingLaunch, run: Run, shape: ClusterLayout, nodes: NodeConnections, say: Say) -> None:
    """Node 0: wait for the others, and send them the run, their ranks and the settings for all nodes."""
    from primus.launch.node_order import assign_node_ranks  # for jobs of several nodes only

    assert shape.master_port is not None
    host = find_node_name()
    reply = rendezvous.JoinReply(run.id, pending.launch.attempt, env=pending.env, extra=pending.extra, host=host)
    timeout_s = _choose_rendezvous_timeout_s(pending.launch)
    rendezvous.lead_rendezvous(
        shape.master_port,
        shape.nnodes,
        reply,
        _compute_fingerprint(pending.per_node, shape),
        timeout_s,
        nodes.kept,
        lambda peers: assign_node_ranks(pending.launch, run, peers, say),
    )


def _report_unfit_nodes(run: Run, nodes: NodeConnections, launch: Launch, say: Say) -> None:
    """Say and record which nodes of the job are unfit: they were asked for, became unfit meanwhile, or are needed.

    The runtimes leave unfit nodes out where others can take their places; from here on the job has these nodes.
    """
    from primus.launch.nodes.avoided_nodes import report_used_nodes  # for jobs of several nodes
    from primus.runs.unfit_nodes import read_unfit_nodes

    hosts = [find_node_name(), *(peer.host for peer in nodes.kept.values())]
    report_used_nodes(read_unfit_nodes(launch.context.environ), hosts, run, say)

"""Run a prepared job on this node: make or continue its run folder, perform the plan, record how it ended."""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import structs

from primus import __version__, process
from primus.errors import PrimusError
from primus.launch import execute, meet, plan, show
from primus.launch.plan import Context
from primus.launch.prepare import Launch, planned
from primus.launch.request import without_secrets
from primus.machine.cluster import Layout
from primus.runs import snapshot
from primus.runs.events import EventLog
from primus.runs.files import write_json, write_text
from primus.runs.store import Metadata, Outcome, Run, create
from primus.secret import mask_words

MEETING_TIMEOUT_S = 600.0


def perform(launch: Launch, context: Context, say: Callable[[str], None]) -> tuple[Run, Outcome]:
    """Execute a prepared launch and record it; gives its run folder and how it ended.

    Raises:
        PrimusError: Something that the launcher itself does fails; a failing worker is an Outcome.
    """
    shape = launch.plan.layout
    assert shape is not None
    launch = _agreed(launch, shape, context)
    run = _open(launch, shape)
    with run.lock() as is_ours:
        if not is_ours and shape.node_rank == 0:
            raise PrimusError(
                f"{run.directory} is being executed by another process", "wait for its end, or start another run"
            )
        _write_plan(launch, run, shape)
        _gather(launch, run, shape)
        return run, _supervised(launch, run, shape, context.environ, say, keeps_record=is_ours)


def _agreed(launch: Launch, shape: Layout, context: Context) -> Launch:
    """`launch` in the run folder that all nodes of the layout agree on."""
    if shape.master_port is not None and shape.node_rank == 0:
        meet.check_port_free(shape.master_port)
    if shape.nnodes == 1:
        return launch
    assert shape.master_port is not None
    print_of_all = _fingerprint(launch, shape)
    if shape.node_rank > 0:
        welcome = meet.join(shape.master_addr, shape.master_port, shape.node_rank, print_of_all, MEETING_TIMEOUT_S)
        directory = Path(launch.directory).parent / welcome.run_id
        job = structs.replace(launch.job, resume=str(directory) if directory.exists() else None)
        return planned(job, launch.request, launch.command, context, directory, welcome.attempt)
    return launch


def _fingerprint(launch: Launch, shape: Layout) -> str:
    """Hash of what must be equal on all nodes: the configuration and the number of processes."""
    digest = hashlib.sha256(f"{shape.nnodes} {shape.nproc} {launch.request.task}".encode())
    for name, text in sorted(launch.job.files.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _open(launch: Launch, shape: Layout) -> Run:
    """The run folder, with what was asked."""
    directory = Path(launch.directory)
    if launch.job.resume:
        return Run(directory)
    run = create(directory, _metadata(launch))
    for name, text in launch.job.files.items():
        write_text(directory / name, text)
    write_json(directory / "request.json", without_secrets(launch.request))
    return run


def _write_plan(launch: Launch, run: Run, shape: Layout) -> None:
    """This attempt's plan, on its own and at the head of what the launcher says."""
    if shape.node_rank == 0:
        write_json(run.directory / "plan.json", plan.shown(launch.plan))
    log = execute.launch_log(run, launch.plan)
    log.parent.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with log.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"[{now}] attempt {launch.attempt} on {socket.gethostname()}\n{show.text(launch.plan)}\n")


def _gather(launch: Launch, run: Run, shape: Layout) -> None:
    """Node 0 waits for the others; a run that does not begin has failed."""
    if shape.node_rank > 0 or shape.nnodes == 1:
        return
    assert shape.master_port is not None
    welcome = meet.Welcome(run.id, launch.attempt)
    try:
        meet.lead(shape.master_port, shape.nnodes, welcome, _fingerprint(launch, shape), MEETING_TIMEOUT_S)
    except PrimusError as error:
        _record(run, Outcome(state="failed", exit_code=error.exit_code, reason=error.problem), launch.attempt)
        raise


def _metadata(launch: Launch) -> Metadata:
    revision = process.output(["git", "rev-parse", "HEAD"], timeout_s=2)
    changes = process.output(["git", "status", "--porcelain", "--untracked-files=no"], timeout_s=2)
    return Metadata(
        id=Path(launch.directory).name,
        name=launch.job.name,
        command=mask_words(launch.command),
        task=launch.request.task,
        runtimes=[segment.name for segment in launch.request.runtimes],
        user=getpass.getuser(),
        host=socket.gethostname(),
        git_revision=revision,
        git_dirty=None if changes is None else bool(changes),
        version=__version__,
        created=time.time(),
        replay_of=launch.job.replay_of,
        forced=list(launch.job.forced),
    )


def _supervised(
    launch: Launch,
    run: Run,
    shape: Layout,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    keeps_record: bool,
) -> Outcome:
    """Execute the plan; of the nodes that share a run folder, the one that holds its lock keeps the record."""
    is_head = shape.node_rank == 0
    verb = "continuing" if launch.job.resume and is_head else "run"
    say(f"{verb} {os.path.relpath(run.directory)}")
    if keeps_record:
        run.update(started=time.time(), ended=None, attempts=launch.attempt + 1, outcome=Outcome(state="running"))
    sources = {name: variable.source for name, variable in launch.plan.env.items()}
    workers = dict(environ) | {name: variable.value for name, variable in launch.plan.env.items()}
    env_folder = run.directory / ("env" if is_head else f"env/node_{shape.node_rank}")

    def after_start() -> None:
        snapshot.write_environment(env_folder, workers, sources)

    try:
        outcome = execute.execute(launch.plan, run, launch.attempt, environ, after_start)
    except PrimusError as error:
        if keeps_record:
            _record(run, Outcome(state="failed", exit_code=error.exit_code, reason=error.problem), launch.attempt)
        raise
    if keeps_record:
        _record(run, outcome, launch.attempt)
    return outcome


def _record(run: Run, outcome: Outcome, attempt: int) -> None:
    log = EventLog(run.events)
    log.append("run_ended", attempt=attempt, state=outcome.state, exit_code=outcome.exit_code, reason=outcome.reason)
    log.close()
    run.update(ended=time.time(), outcome=outcome)

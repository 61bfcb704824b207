"""What a launch writes into its run folder: the request, then of each attempt the plan, and its environment."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path

from msgspec import structs

from primus import __version__, process
from primus.launch.prepare import Launch
from primus.launch.variables import TYPED_VARIABLE
from primus.machine.cluster import ClusterLayout
from primus.messages import Say
from primus.plan import LaunchJob, Variable, format_plan, redact_plan
from primus.redaction import fingerprint_key, redact, redact_args
from primus.runs import lock
from primus.runs.files import to_json, write_json, write_text
from primus.runs.store import Run, RunMetadata, RunOutcome, create_run
from primus.runtime import LaunchRequest, RequestSegment

HOOK_LOGS = "logs/hooks"


def make_run_folder(directory: Path, job: LaunchJob, request: LaunchRequest, command: tuple[str, ...]) -> Run:
    """Create the run folder `directory` of `job`; `command` is the typed command.

    Raises:
        PrimusError: It cannot be created, or the job must not start beside a run that has just started.
    """
    fingerprint_key.keep()  # so that later runs have comparable fingerprints
    metadata = _make_metadata(directory, job, request, command)
    # Held until the configuration is written, by which the same command at the same time recognizes this run.
    with lock.hold_workspace(Path(job.workspace)):
        job.check_new(directory.name)
        run = create_run(directory, metadata)
        write_files(directory, job)
    write_json(directory / "request.json", _redact_request(request))
    return run


def format_files(directory: Path, job: LaunchJob, request: LaunchRequest, command: tuple[str, ...]) -> dict[str, str]:
    """The files of a new run folder, by relative path."""
    metadata = to_json(structs.replace(_make_metadata(directory, job, request, command), **_read_revision())) + "\n"
    return {"metadata.json": metadata, **job.files, "request.json": to_json(_redact_request(request)) + "\n"}


def write_files(directory: Path, job: LaunchJob) -> None:
    """Write the files of `job`, such as its resolved configuration."""
    for name, text in job.files.items():
        write_text(directory / name, text)


def _redact_request(request: LaunchRequest) -> LaunchRequest:
    """`request` without secrets, as a run folder stores it."""
    runtimes = tuple(RequestSegment(segment.name, tuple(redact_args(segment.words))) for segment in request.runtimes)
    return LaunchRequest(runtimes=runtimes, task=request.task, words=tuple(redact_args(request.words)))


def _make_metadata(directory: Path, job: LaunchJob, request: LaunchRequest, command: tuple[str, ...]) -> RunMetadata:
    return RunMetadata(
        id=directory.name,
        name=job.name,
        command=redact_args(command),
        task=request.task,
        runtimes=[segment.name for segment in request.runtimes],
        user=getpass.getuser(),
        host=os.uname().nodename,
        working_folder=str(Path.cwd()),
        version=__version__,
        created=time.time(),
        replay_of=job.replay_of,
        forced=list(job.forced),
    )


def record_revision(run: Run) -> None:
    """Record the revision of the checkout in which the command was typed."""
    run.update_metadata(**_read_revision())


def _read_revision() -> dict[str, str | bool | None]:
    revision = process.read_output(["git", "rev-parse", "HEAD"], timeout_s=2) or read_head(Path.cwd())
    look = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]  # without an index
    changes = process.read_output(look, timeout_s=2)
    return {"git_revision": revision, "git_dirty": None if changes is None else bool(changes)}


def read_head(folder: Path) -> str | None:
    """The revision of the checkout around `folder`, from its files: images often have no git, and git refuses checkouts
    of other users (safe.directory)."""
    for above in (folder, *folder.parents):
        if (above / ".git").is_dir():
            return _resolve_reference(above / ".git", "HEAD")
    return None


def _resolve_reference(repository: Path, name: str) -> str | None:
    """Revision of a branch or of HEAD (gitrepository-layout(5))."""
    try:
        text = (repository / name).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        packed = repository / "packed-refs"
        lines = packed.read_text(encoding="utf-8", errors="replace").splitlines() if packed.is_file() else []
        return next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), None)
    return _resolve_reference(repository, text[5:]) if text.startswith("ref: ") else text or None


def open_run(launch: Launch) -> Run:
    """The run folder, with the request."""
    directory = Path(launch.directory)
    if launch.job.resume:
        return Run(directory)
    return make_run_folder(directory, launch.job, launch.request, launch.command)


def find_launch_log(run: Run, node_rank: int) -> Path:
    """Log of the launcher of a node and of its agent or engine; nodes may share the folder."""
    return run.directory / "logs" / (f"launch.node_{node_rank}.log" if node_rank else "launch.log")


def move_node_files(source: Path, target: Path, joined_as: int, node_rank: int) -> None:
    """Move logs and records of the private folder to the run folder; a log that exists there is appended to.

    Args:
        joined_as: Rank of the node when it wrote them.
        node_rank: Its rank since the rendezvous.
    """
    from primus.runs import patch_records  # for jobs of several nodes only

    for file in sorted((source / HOOK_LOGS).glob("*.log")):
        (target / HOOK_LOGS).mkdir(parents=True, exist_ok=True)
        name = file.name.replace(f".node_{joined_as}.log", f".node_{node_rank}.log")
        with (target / HOOK_LOGS / name).open("ab") as log:
            log.write(file.read_bytes())
    record = source / patch_records.index_path(joined_as)
    if record.is_file():
        write_text(target / patch_records.index_path(node_rank), record.read_text(encoding="utf-8"))


def record_start(launch: Launch, run: Run, say: Say, *, keeps_record: bool) -> None:
    """Record the plan and the start of an attempt."""
    shape = launch.plan.layout
    assert shape
    _write_plan(launch, run, shape)
    if shape.node_rank == 0:
        say(f"{'continuing' if launch.attempt else 'run'} {os.path.relpath(run.directory)}")
    # One writer: nodes that updated the metadata at the same time would lose each other's changes.
    if keeps_record:
        run.update_metadata(
            started=time.time(), ended=None, attempts=launch.attempt + 1, outcome=RunOutcome(state="running")
        )


def _write_plan(launch: Launch, run: Run, shape: ClusterLayout) -> None:
    """Write this attempt's plan to its file, and to the head of the launcher's log."""
    if shape.node_rank == 0:
        write_json(run.directory / "plan.json", redact_plan(launch.plan))
    log = find_launch_log(run, shape.node_rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with log.open("a", encoding="utf-8", errors="surrogateescape") as file:
        text = f"[{now}] attempt {launch.attempt} on {os.uname().nodename}\n{format_plan(launch.plan)}\n"
        file.write(redact(text))


def record_environment(launch: Launch, run: Run) -> None:
    """Record the environment of the workers, their machine, and the revision of a new run."""
    from primus.launch.hooks.discovery import list_source_folders  # the workers start meanwhile
    from primus.runs import snapshot, source_record

    if not launch.job.resume:
        record_revision(run)
    shape, variables = launch.plan.layout, launch.plan.env
    assert shape
    sources = {name: variable.source for name, variable in variables.items()}
    place = run.directory / ("env" if shape.node_rank == 0 else f"env/node_{shape.node_rank}")
    facts = launch.context.facts(shape.master_of_several)  # the facts of the plan
    environ = launch.make_environ()
    typed = environ.get(TYPED_VARIABLE, "").split(",")
    of_shell = {name: Variable(value, "shell", is_inherited=name not in typed) for name, value in environ.items()}
    texts = {name: variable.format_value(name) for name, variable in {**of_shell, **variables}.items()}
    packages = None
    if launch.engine and launch.engine.installation:
        from primus.engines.installation import list_installation_folders
        from primus.site_folders import list_package_versions

        packages = list_package_versions(list_installation_folders(launch.engine.installation))
        write_json(place / "engine.json", launch.engine.installation)
    snapshot.write_environment(place, texts, sources, facts, packages)
    if shape.node_rank == 0:
        source_record.record_sources(run, list_source_folders(environ))

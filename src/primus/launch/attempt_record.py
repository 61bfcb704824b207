"""What a node writes into the run folder when an attempt starts: the plan, the environment, logs of its hooks."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from primus import plan
from primus.engines.installation import find_environment, list_installation_folders
from primus.launch import run_folder
from primus.launch.prepare import Launch
from primus.launch.supervision import worker_processes
from primus.launch.variables import TYPED_VARIABLE
from primus.machine.cluster import ClusterLayout
from primus.messages import Say
from primus.plan import Variable
from primus.redaction import redact
from primus.runs import patch_records, snapshot
from primus.runs.files import write_json, write_text
from primus.runs.store import Run, RunOutcome
from primus.site_folders import list_package_versions

HOOK_LOGS = "logs/hooks"


def make_worker_environment(launch: Launch) -> dict[str, str]:
    """Variables of the workers."""
    return dict(launch.context.environ) | {name: variable.value for name, variable in launch.plan.env.items()}


def move_node_files(source: Path, target: Path, shape: ClusterLayout) -> None:
    """Move logs and records of the private folder to the run folder; a log that exists there is appended to."""
    for file in sorted((source / HOOK_LOGS).glob("*.log")):
        (target / HOOK_LOGS).mkdir(parents=True, exist_ok=True)
        with (target / HOOK_LOGS / file.name).open("ab") as log:
            log.write(file.read_bytes())
    record = Path(patch_records.index_path(shape.node_rank))
    if (source / record).is_file():
        write_text(target / record, (source / record).read_text(encoding="utf-8"))


def open_run(launch: Launch) -> Run:
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
        text = f"[{now}] attempt {launch.attempt} on {socket.gethostname()}\n{plan.format_plan(launch.plan)}\n"
        file.write(redact(text))


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


def record_environment(launch: Launch, run: Run) -> None:
    """Record the environment of the workers, and their machine."""
    shape, variables = launch.plan.layout, launch.plan.env
    assert shape
    sources = {name: variable.source for name, variable in variables.items()}
    place = run.directory / ("env" if shape.node_rank == 0 else f"env/node_{shape.node_rank}")
    facts = launch.context.facts(shape.master_of_several)  # the facts of the plan
    engine, environ = launch.engine, make_worker_environment(launch)
    typed = environ.get(TYPED_VARIABLE, "").split(",")
    of_shell = {name: Variable(value, "shell", is_inherited=name not in typed) for name, value in environ.items()}
    texts = {name: variable.format_value(name) for name, variable in {**of_shell, **variables}.items()}
    installation = engine and (engine.installation or find_environment(engine.name, engine.requirement, environ))
    packages = list_package_versions(list_installation_folders(installation)) if installation else None
    snapshot.write_environment(place, texts, sources, facts, packages)
    if installation:
        write_json(place / "engine.json", installation)

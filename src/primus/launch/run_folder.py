"""Create the run folder of a job, with its request."""

from __future__ import annotations

import getpass
import os
import time
from pathlib import Path

from primus import __version__, process
from primus.plan import LaunchJob, LaunchRequest, redact_request
from primus.redaction import fingerprint_key, redact_args
from primus.runs import lock
from primus.runs.files import to_json, write_json, write_text
from primus.runs.store import Run, RunMetadata, create_run


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
    write_json(directory / "request.json", redact_request(request))
    return run


def format_files(directory: Path, job: LaunchJob, request: LaunchRequest, command: tuple[str, ...]) -> dict[str, str]:
    """The files of a new run folder, by relative path."""
    metadata = to_json(_make_metadata(directory, job, request, command)) + "\n"
    return {"metadata.json": metadata, **job.files, "request.json": to_json(redact_request(request)) + "\n"}


def write_files(directory: Path, job: LaunchJob) -> None:
    """Write the files of `job`, such as its resolved configuration."""
    for name, text in job.files.items():
        write_text(directory / name, text)


def _make_metadata(directory: Path, job: LaunchJob, request: LaunchRequest, command: tuple[str, ...]) -> RunMetadata:
    revision = process.read_output(["git", "rev-parse", "HEAD"], timeout_s=2)
    look = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]  # without an index
    changes = process.read_output(look, timeout_s=2)
    return RunMetadata(
        id=directory.name,
        name=job.name,
        command=redact_args(command),
        task=request.task,
        runtimes=[segment.name for segment in request.runtimes],
        user=getpass.getuser(),
        host=os.uname().nodename,
        git_revision=revision,
        git_dirty=None if changes is None else bool(changes),
        version=__version__,
        created=time.time(),
        replay_of=job.replay_of,
        forced=list(job.forced),
    )

"""Run in the background of this machine, as a job that `jobs list`, `jobs logs` and `jobs cancel` know."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from msgspec import Struct

from primus.errors import EXIT_OK
from primus.launch.jobs.submissions import remember_submission
from primus.messages import Say
from primus.plan import LaunchPlan, PlanContext
from primus.redaction import redact_args
from primus.runs.store import Run
from primus.runtime import JobState, RemoteLaunch, Submission

LEVEL = "cluster"
LOG = "logs/background.log"
EXIT_CODE = "logs/background.exit_code"


class Options(Struct, frozen=True, kw_only=True):
    """Run in the background of this machine."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """A script that runs the rest of the chain and keeps its exit code; a plan with a file has a run folder."""
    script = f"{context.directory}/background.sh"
    text = f"#!/bin/sh\n{shlex.join(context.there)}\necho $? > {shlex.quote(f'{context.directory}/{EXIT_CODE}')}\n"
    return LaunchPlan(argv=("sh", script), env=plan.env, files={script: text}, inner=plan)


def start(remote: RemoteLaunch, run: Run | None, say: Say) -> int:
    """Start the script in a session of its own, and record it."""
    log = Path(remote.directory, LOG)
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            remote.plan.argv,
            env=remote.make_environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    submission = Submission(
        runtime="background",
        id=str(process.pid),
        name=remote.context.name,
        directory=remote.directory,
        submitted=time.time(),
        host=socket.gethostname(),
        command=tuple(redact_args(remote.command)),
        logs=(LOG,),
    )
    remember_submission(submission, remote.context.environ, say)
    say(f"job {process.pid}; its log: primus-cli direct -- jobs logs {process.pid} --follow")
    return EXIT_OK


def find_states(submissions: Sequence[Submission]) -> dict[str, JobState]:
    """Running while the process exists; then done or failed by the exit code that the script left."""
    return {each.id: _find_state(each) for each in submissions}


def _find_state(submission: Submission) -> JobState:
    with contextlib.suppress(psutil.NoSuchProcess):
        if psutil.Process(int(submission.id)).status() != psutil.STATUS_ZOMBIE:
            return JobState(state="running")
    try:
        code = int(Path(submission.directory, EXIT_CODE).read_text())
    except (OSError, ValueError):
        return JobState(state="failed", reason="killed")
    return JobState(state="failed" if code else "done", exit_code=code)


def cancel(submission: Submission) -> None:
    """Signal all processes of the session; workers save a checkpoint on SIGTERM."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(submission.id), signal.SIGTERM)

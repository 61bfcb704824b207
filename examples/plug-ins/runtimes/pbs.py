"""Run as a batch job of PBS (OpenPBS), with one launcher on each node."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import EXIT_OK, PrimusError
from primus.launch.jobs.submissions import remember_submission
from primus.launch.run_remote import SubmissionRejected
from primus.messages import Say
from primus.plan import LaunchPlan, PlanContext
from primus.redaction import redact_args
from primus.runs.store import Run
from primus.runtime import JobState, RemoteLaunch, SchedulerState, Submission

LEVEL = "cluster"
LIMIT_S = 60.0
STATES: dict[str, SchedulerState] = {"Q": "queued", "H": "queued", "W": "queued", "T": "queued"}
"""States of qstat(1B) in which a job waits; F is an ended job, and in all others it runs."""

JOB = """\
#!/bin/bash
{directives}
# pbsdsh gives its programs no variables of the job, so that each node gets its rank and the master as arguments.
nodes=($(sort -u "$PBS_NODEFILE"))
port=$((20000 + ${{PBS_JOBID%%.*}} % 10000))
status=0
for rank in "${{!nodes[@]}}"; do
    pbsdsh -n "$rank" -- /bin/bash {node} "$rank" "${{#nodes[@]}}" "${{nodes[0]}}" "$port" &
done
for _ in "${{nodes[@]}}"; do wait -n || status=$?; done
exit $status
"""
NODE = """\
#!/bin/bash
export NODE_RANK=$1 NNODES=$2 MASTER_ADDR=$3 MASTER_PORT=$4
cd {folder} && exec {command}
"""


class Options(Struct, frozen=True, kw_only=True):
    """Run as a batch job of PBS."""

    nodes: Annotated[int, Meta(ge=1)] = 1
    """Nodes of the job."""
    gpus: int = 8
    """GPUs of each node."""
    walltime: str = "24:00:00"
    """Time limit."""
    queue: str | None = None
    """Queue (default: that of the server)."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """`plan` on each node of a job, by two scripts in the run folder."""
    folder = context.directory
    words = [f"-N {context.name[:15]}", f"-l select={options.nodes}:ngpus={options.gpus}", "-l place=scatter:excl"]
    words += [f"-l walltime={options.walltime}", "-j oe", f"-o {shlex.quote(f'{folder}/logs/pbs.log')}"]
    words += [f"-q {options.queue}"] if options.queue else []
    job, node = f"{folder}/job.pbs", f"{folder}/node.sh"
    command = shlex.join(context.there)
    files = {
        job: JOB.format(directives="\n".join(f"#PBS {word}" for word in words), node=shlex.quote(node)),
        node: NODE.format(folder=shlex.quote(context.environ.get("PWD", "/")), command=command),
    }
    return LaunchPlan(argv=("qsub", job), env=plan.env, files=files, inner=plan)


def start(remote: RemoteLaunch, run: Run | None, say: Say) -> int:
    """Submit the job, and record it."""
    assert run is not None, "a plan with files has a run folder"
    (run.directory / "logs").mkdir(exist_ok=True)
    try:
        identity = run_command(*remote.plan.argv)
    except PrimusError as error:  # the new run folder is removed
        raise SubmissionRejected.from_error(error) from None
    submission = Submission(
        runtime="pbs",
        id=identity,
        name=remote.context.name,
        directory=remote.directory,
        submitted=time.time(),
        host=socket.gethostname(),
        command=tuple(redact_args(remote.command)),
        logs=("logs/pbs.log",),
    )
    remember_submission(submission, remote.context.environ, say)
    say(f"job {identity} is queued; its log: primus-cli direct -- jobs logs {identity} --follow")
    return EXIT_OK


def find_states(submissions: Sequence[Submission]) -> dict[str, JobState]:
    """States of jobs, also of ended ones, by one command."""
    jobs = json.loads(run_command("qstat", "-x", "-f", "-F", "json", *(each.id for each in submissions)))["Jobs"]
    return {identity: _read_state(job) for identity, job in jobs.items()}


def _read_state(job: dict[str, object]) -> JobState:
    raw, code = str(job["job_state"]), job.get("Exit_status")
    if raw == "F":
        is_done = code == 0
        return JobState(state="done" if is_done else "failed", raw=raw, exit_code=code if isinstance(code, int) else 1)
    return JobState(state=STATES.get(raw, "running"), raw=raw, reason=str(job.get("comment", "")))


def cancel(submission: Submission) -> None:
    """Delete a job; its processes receive SIGTERM."""
    run_command("qdel", submission.id)


def run_command(*words: str) -> str:
    """Output of a command of PBS.

    Raises:
        PrimusError: It fails, or does not respond.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrimusError(f"{words[0]}: {error}", "run this on a login node of a PBS cluster") from None
    if done.returncode:
        raise PrimusError(f"{words[0]}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()

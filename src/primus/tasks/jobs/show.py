"""Show one job: state, nodes, command and run folder."""

from __future__ import annotations

import shlex
from pathlib import Path

from msgspec import Struct, structs

from primus.config.flags import PositionalRun
from primus.errors import PrimusError
from primus.launch.jobs import job_states, logs, submissions
from primus.report import table
from primus.runs.store import Run
from primus.runtime import JobState, Submission
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `jobs show`."""

    job: PositionalRun
    """Job id, run folder, run id, or name (the newest job of that name)."""


def run(options: Options, context: TaskContext) -> None:
    """Print the job.

    Raises:
        PrimusError: The job does not exist, or its scheduler does not respond.
    """
    submission = submissions.find_submission(options.job, context.environ)
    state = job_states.query_state(submission, context.environ)
    context.result(structs.asdict(submission) | {"state": state}, _format_job_facts(submission, state))


def _format_job_facts(submission: Submission, state: JobState) -> str:
    rows = {
        "job": f"{submission.id} ({submission.runtime}{_format_job_place(submission)})",
        "name": submission.name,
        "state": job_states.format_state(state)
        + (f", exit code {state.exit_code}" if state.exit_code is not None else ""),
        "waits": state.advice,
        "starts": f"{table.format_time(state.starts)} (expected)" if state.starts else "",
        "time left": table.format_duration(state.time_left_s) if state.time_left_s is not None else "",
        "scheduler": state.raw,
        "nodes": ",".join(state.nodes) or str(state.num_nodes or ""),
        "GPUs": str(state.gpus or ""),
        "restarts": str(state.restarts) if state.restarts else "",
        "submitted": f"{table.format_time(submission.submitted)} by {submission.user} on {submission.host}",
        "command": f"primus-cli {shlex.join(submission.command)}",
        "run": submission.directory,
        "run state": _run_state(submission),
        "logs": "\n               ".join(str(path) for path in logs.list_log_files(submission)),
    }
    return "\n".join(f"{name + ':':<15}{value}" for name, value in rows.items() if value)


def _format_job_place(submission: Submission) -> str:
    return "".join(f", {name} {value}" for name, value in submission.place.items())


def _run_state(submission: Submission) -> str:
    try:
        outcome = Run(Path(submission.directory)).read_metadata().outcome
    except PrimusError as error:
        return error.problem
    return outcome.state + (f": {outcome.reason}" if outcome.reason else "")

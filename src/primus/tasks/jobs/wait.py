"""Wait until a job ends, and exit with its exit code."""

from __future__ import annotations

import sys

from msgspec import Struct

from primus.config.flags import PositionalRun
from primus.launch.jobs import job_states, submissions
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `jobs wait`."""

    job: PositionalRun
    """Job id, run folder, run id, or name (the newest job of that name)."""
    timeout: float | None = None
    """Seconds after which to stop waiting, with exit code 124; the job continues to run."""


def run(options: Options, context: TaskContext) -> int:
    """Wait, and give the exit code of the job's run.

    It is 130 if the job was cancelled before it started, and 124 after the job's time limit or `--timeout`.

    Raises:
        UsageError: The job does not exist.
    """
    submission = submissions.find_submission(options.job, context.environ)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with job_states.detach_on_signal(submission.id, f"direct -- jobs cancel {submission.id}", say) as waiting:
        state = job_states.wait_for_job(submission, context.environ, say, options.timeout)
        context.result({"id": submission.id, "state": state}, f"job {submission.id}: {job_states.format_state(state)}")
        waiting.exit_code = job_states.report_end(submission, state, say)
    return waiting.exit_code

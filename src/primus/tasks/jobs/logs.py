"""Print the log of a job; --follow prints new lines as they arrive."""

from __future__ import annotations

import sys

from msgspec import Struct

from primus import registry
from primus.config.flags import PositionalRun
from primus.errors import EXIT_OK, UsageError
from primus.launch.jobs import job_states, logs, submissions
from primus.launch.jobs.job_states import ENDED
from primus.runtime import JOB_RUNTIMES, Submission
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `jobs logs`."""

    job: PositionalRun
    """Job id, run folder, run id, or name (the newest job of that name)."""
    follow: bool = False
    """Print new lines until the job ends; Ctrl-C leaves the job running."""
    tail: int | None = None
    """Start with the last N lines."""
    rank: int | None = None
    """Print the log of this rank instead of the scheduler's log."""


def run(options: Options, context: TaskContext) -> int:
    """Print the log.

    Raises:
        UsageError: The job does not exist, or has no log yet.
    """
    submission = submissions.find_submission(options.job, context.environ)
    if options.tail is not None and options.tail < 0:
        raise UsageError(f"--tail {options.tail} is not a number of lines", "use a number from 0")
    runtime = registry.load_plug_in(JOB_RUNTIMES, submission.runtime)
    if runtime.print_logs and options.rank is None:
        runtime.print_logs(submission, options.follow, options.tail)
        return EXIT_OK
    if options.follow:
        return _follow_job_log(submission, options, context)
    paths = logs.list_log_files(submission, options.rank)
    if not paths:
        raise _build_missing_log_error(submission, options, context)
    logs.print_logs(paths, options.tail, sys.stdout)
    return EXIT_OK


def _follow_job_log(submission: Submission, options: Options, context: TaskContext) -> int:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        logs.follow_logs(submission, context.environ, sys.stdout, say, tail=options.tail, rank=options.rank)
    except KeyboardInterrupt:
        say(f"job {submission.id} continues to run")
    return EXIT_OK


def _build_missing_log_error(submission: Submission, options: Options, context: TaskContext) -> UsageError:
    what = "no log" if options.rank is None else f"no log of rank {options.rank}"
    state = job_states.query_state(submission, context.environ)
    if state.state in (*ENDED, "gone"):
        return UsageError(f"job {submission.id} has {what}; it is {job_states.format_state(state)}")
    return UsageError(
        f"job {submission.id} has {what} yet; it is {job_states.format_state(state)}", "to wait for it: --follow"
    )

"""Cancel a job; its processes receive SIGTERM and save a checkpoint."""

from __future__ import annotations

from msgspec import Struct

from primus import registry
from primus.config.flags import PositionalRun
from primus.launch.jobs import job_states, submissions
from primus.runtime import JOB_RUNTIMES
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `jobs cancel`."""

    job: PositionalRun
    """Job id, run folder, run id, or name (the newest job of that name)."""


def run(options: Options, context: TaskContext) -> None:
    """Cancel the job.

    Raises:
        PrimusError: The job does not exist, or the scheduler does not cancel it.
    """
    submission = submissions.find_submission(options.job, context.environ)
    state = job_states.query_state(submission, context.environ)
    if state.state in job_states.ENDED:
        context.result({"id": submission.id, "state": state}, f"job {submission.id} has ended already: {state.state}")
        return
    registry.load_plug_in(JOB_RUNTIMES, submission.runtime).cancel(submission)
    text = f"job {submission.id} ({submission.name}) is being cancelled"
    context.result({"id": submission.id, "cancelled": True}, text)

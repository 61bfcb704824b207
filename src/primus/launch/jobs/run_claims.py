"""Claims of jobs on run folders: at most one queued or running job may own a run."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping

from primus.errors import PrimusError
from primus.launch.jobs.job_states import query_state
from primus.launch.jobs.submissions import read_holder
from primus.runs import lock
from primus.runs.store import Run

FILE = ".submission.lock"


def check_free(run: Run, environ: Mapping[str, str]) -> None:
    """Raise PrimusError if a queued or running job owns this run, or if the scheduler does not answer."""
    holder = read_holder(run.directory)
    if holder is None:
        return
    state = query_state(holder, environ)
    if state.state in ("queued", "running"):
        raise PrimusError(
            f"{run.directory} belongs to job {holder.id} of {holder.runtime}, which is {state.state}",
            f"wait until the job ends, or cancel it: primus-cli direct -- jobs cancel {holder.id}",
        )


def is_held(run: Run, environ: Mapping[str, str]) -> bool:
    """Whether a queued or running job owns this run; also True if the scheduler does not answer."""
    try:
        check_free(run, environ)
    # Without an answer the run may have a job: two jobs in one run folder are worse than a refused command.
    except PrimusError:
        return True
    return False


def is_being_submitted(run: Run) -> bool:
    """Whether a command is submitting this run, or waits for its step."""
    try:
        with (run.directory / FILE).open() as file:
            return not lock.lock_file(file, fcntl.LOCK_SH, tries=1)
    except OSError:
        return False


@contextlib.contextmanager
def hold_for_submission(run: Run, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold `run` from before its submission until the record of the job is written.

    The lock keeps two commands from submitting the same run at once; `check_free` finds the job of an earlier command.
    The lock is tried first: a command that waits for its job still holds it, and then the job's id is the better
    message.

    Raises:
        PrimusError: A queued or running job owns the run, another command is submitting it, or the scheduler does not
            answer.
    """
    # The file stays: a lock on a removed file would not exclude a command that creates a new one. The kernel releases
    # flock when the process ends, also after SIGKILL, so no lock outlives its command.
    with (run.directory / FILE).open("w") as file:
        is_ours = lock.lock_file(file, fcntl.LOCK_EX)
        check_free(run, environ)
        if not is_ours:
            raise PrimusError(
                f"another command is submitting {run.directory}, or waits for its job",
                "find its job: primus-cli direct -- jobs list",
            )
        yield

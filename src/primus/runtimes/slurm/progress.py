"""Post the progress of a run as the comment of its Slurm job: `squeue -o "%i %k"` shows it."""

from __future__ import annotations

from collections.abc import Mapping

from primus.errors import PrimusError
from primus.runs.run_progress import RunProgress, format_progress
from primus.runtime import PostRefused
from primus.runtimes.slurm import queries

LIMIT_S = 20.0


def post_comment(job: str, run_comment: str, progress: RunProgress, environ: Mapping[str, str]) -> None:
    """Replace the comment of a job.

    Args:
        job: Id of the job.
        run_comment: The comment with which it was submitted; it stays at the head.
        progress: What to post.
        environ: Variables of the batch script.

    Raises:
        PostRefused: The job has a comment of its user, or Slurm does not permit the change.
        PrimusError: Slurm does not respond.
    """
    shown = queries.run_query(["squeue", "--noheader", f"--jobs={job}", "--format=%k"], environ, LIMIT_S)
    if shown.code != 0:
        raise PrimusError(f"squeue does not respond: {shown.err or shown.code}")
    # sites use comments too, for accounting or by job_submit plug-ins
    if shown.out.strip().partition(" ")[0] != run_comment:
        raise PostRefused("the job has a comment of its own")
    text = f"{run_comment} {format_progress(progress)}"
    answer = queries.run_query(["scontrol", "update", f"JobId={job}", f"Comment={text}"], environ, LIMIT_S)
    if answer.code is None:
        raise PrimusError(answer.err)
    if answer.code != 0:
        raise PostRefused(f"scontrol update: {answer.err or answer.code}")

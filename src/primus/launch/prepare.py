"""Plan a job on this node without touching anything."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.launch import chain
from primus.launch.plan import Context, Job, LaunchPlan
from primus.launch.request import Request
from primus.runs.store import Run, new_id


class Launch(Struct, frozen=True, kw_only=True):
    """A job on this node, planned."""

    job: Job
    request: Request
    command: tuple[str, ...]
    """Words that were typed."""
    directory: str
    """Run folder."""
    attempt: int
    plan: LaunchPlan


def prepare(job: Job, request: Request, command: tuple[str, ...], context: Context) -> Launch:
    """Plan `job` on this node without touching anything.

    Raises:
        UsageError: The job cannot run in this layout, or an option is wrong.
    """
    if job.resume:
        run = Run(Path(job.resume).resolve())
        return planned(job, request, command, context, run.directory, run.metadata().attempts)
    return planned(job, request, command, context, Path(job.workspace).absolute() / job.name / new_id(), 0)


def planned(
    job: Job, request: Request, command: tuple[str, ...], context: Context, directory: Path, attempt: int
) -> Launch:
    """`job` in the run folder `directory`, as its attempt number `attempt`."""
    worker = (context.python, "-m", "primus.worker", str(directory), str(attempt))
    start = LaunchPlan(argv=worker, env=job.env, notes=job.notes)
    folded = chain.fold(request, start, context)
    assert folded.layout is not None, "the chain ends on a node"
    job.check(folded.layout.world_size)
    return Launch(job=job, request=request, command=command, directory=str(directory), attempt=attempt, plan=folded)

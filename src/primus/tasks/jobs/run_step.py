"""Run and supervise the steps of a batch job; batch scripts call this (internal)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct

from primus import registry
from primus.contract import PlugInKind
from primus.plan import RestartPolicy
from primus.runs.store import Run
from primus.task import TaskContext


class BatchRuntime(Protocol):
    """A runtime whose batch scripts call `jobs run-step`."""

    def supervise_batch_job(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        run: Run | None,
        num_nodes: int | None,
        /,
        **restarts: Any,
    ) -> int:
        """Run the steps of a batch job, in its batch script; gives the exit code of the job."""
        ...


BATCH_RUNTIMES = PlugInKind[BatchRuntime]("runtimes", BatchRuntime)


class Options(Struct, frozen=True, kw_only=True):
    """Options of `jobs run-step`."""

    command: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """srun, its options and the launcher, after a second `--`."""
    run: str | None = None
    """Run folder; a job of an array has none and does not restart."""
    num_nodes: Annotated[int, Meta(ge=1)] | None = None
    """Nodes of each step; all nodes of the job by default."""
    requeue: bool = False
    """Requeue the job after a preemption, its time limit or the loss of a node."""
    max_restarts: Annotated[int, Meta(ge=0)] = 0
    """Maximum restarts after failures."""
    restart_delay: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds before the first restart; doubled for each further one without progress."""


def run(options: Options, context: TaskContext) -> int:
    """Run the steps until the job ends; gives its exit code.

    Raises:
        PrimusError: srun cannot be started.
    """
    return registry.load_plug_in(BATCH_RUNTIMES, "slurm").supervise_batch_job(
        options.command,
        context.environ,
        Run(Path(options.run)) if options.run else None,
        options.num_nodes,
        can_requeue=options.requeue,
        policy=RestartPolicy(max_restarts=options.max_restarts, backoff_s=options.restart_delay),
    )

"""Run on the nodes of a Slurm cluster (srun, sbatch)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from primus.errors import UsageError
from primus.machine.cluster import JobSize
from primus.plan import LaunchPlan, PlanContext, RestartPolicy
from primus.runtimes.slurm import script
from primus.runtimes.slurm.options import SPELLINGS, Options, find_num_nodes, find_option_value, parse
from primus.runtimes.slurm.options import split_pyxis_options as split_container_words
from primus.runtimes.slurm.placement import describe_placement, list_placement_options

if TYPE_CHECKING:
    from primus.messages import Say
    from primus.runs.store import Run
    from primus.runtime import ClusterNode, JobState, NodeJob, RemoteLaunch, Submission

LEVEL = "cluster"
STARTS_CONTAINERS = True

__all__ = ["LEVEL", "SPELLINGS", "STARTS_CONTAINERS", "Options", "cancel", "find_states", "list_nodes", "parse"]
__all__ += ["select_node", "split_container_words", "start", "supervise_batch_job", "wrap"]

DROPPED_WITH_PTY = ("input", "unbuffered", "wait")
"""Default options that a step with a terminal (--pty) does not get: srun rejects them, or they would close it."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """`plan` on each node of a step (srun) or of a job (sbatch)."""
    is_step = options.command == "srun"
    planned = _plan_step(plan, options, context) if is_step else _plan_batch_job(plan, options, context)
    listed = context.find_unfit_nodes(options.unfit_nodes)
    if listed is None:
        return planned
    from primus.runtimes.slurm import unfit_nodes  # most users have no list

    return unfit_nodes.add_avoided_nodes(planned, options, listed, context)


def _plan_step(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    given = {each.name for each in options.slurm_options}
    ours = [
        option
        for option in script.step_options(with_workers=context.starts_workers)
        if (name := option[2:].partition("=")[0]) not in given and not ("pty" in given and name in DROPPED_WITH_PTY)
    ]
    return LaunchPlan(
        argv=("srun", *ours, *options.slurm, *_list_placement_words(options), *plan.step_options, *context.there),
        env=plan.env,
        notes=_list_notes(plan, options),
        inner=plan,
    )


def _plan_batch_job(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    from primus.launch.prepare import find_entry_point

    if options.is_array and ("--run", context.directory) in itertools.pairwise(context.there):
        raise UsageError(
            "slurm: --array cannot be used for a task with a run folder, which belongs to one job",
            "submit one job for each run; arrays are for tasks that share their work, such as data encode",
        )
    batch = script.BatchScript(
        options=options,
        run=context.directory,
        name=context.name,
        step_options=plan.step_options,
        command=context.there,
        primus=find_entry_point(),
        has_workers=context.starts_workers,
    )
    file = f"{context.directory}/job.sh"
    _, others = script.split_directives(batch)
    # A variable such as SBATCH_PARTITION overrides the script; options on the command line override the variable.
    is_overruled = any(name.startswith("SBATCH_") for name in context.environ) and "SLURM_JOB_ID" not in context.environ
    repeated = options.slurm if is_overruled else ()
    test = ("--test-only",) if options.test_only else ()
    policy = RestartPolicy(max_restarts=script.max_restarts(options), backoff_s=options.restart_delay)
    return LaunchPlan(
        argv=("sbatch", "--parsable", *test, *repeated, *others, *_list_placement_words(options), file),
        env=plan.env,
        files={file: script.format_batch_script(batch)},
        notes=_list_notes(plan, options),
        policy=policy,
        inner=plan,
    )


def _list_placement_words(options: Options) -> tuple[str, ...]:
    return list_placement_options(options.placement, options.num_placed_nodes)


def _list_notes(plan: LaunchPlan, options: Options) -> tuple[str, ...]:
    """The further jobs of a chain, the placement, and a warning about variables that the user's --export removes."""
    left = options.chain - 1
    jobs = f"{left} more job{'s' * (left > 1)} of the same script, each with --dependency=afterany:<the one before>"
    chained = (f"chain: {jobs}; what is left when the run ends is cancelled",) if left else ()
    notes = (*chained, *describe_placement(options.placement))
    export = find_option_value(options.slurm_options, "export")
    if export is None or "ALL" in export.split(","):
        return notes
    named = {word.partition("=")[0] for word in export.split(",")}
    removed = sorted(set(plan.env) - named)
    examples = f", such as {', '.join(removed)}" if removed else ""
    return (*notes, f"warning: --export={export} removes this shell's variables and secrets from the job{examples}")


def start(remote: RemoteLaunch, run: Run | None, say: Say) -> int:
    """Run the step, or submit the job; gives the exit code."""
    from primus.runtimes.slurm import submit

    return submit.start_step_or_job(remote, run, say)


def supervise_batch_job(
    command: Sequence[str], environ: Mapping[str, str], run: Run | None, num_nodes: int | None, **restarts: Any
) -> int:
    """Run the steps of a batch job, in its batch script; gives the exit code of the job.

    Args:
        command: srun with its options and the launcher.
        environ: Variables of the batch script.
        run: Run of the job; None in a job array.
        num_nodes: Nodes of each step; None for all of the job.
        restarts: `can_requeue` and `policy` of `batch_job.BatchJob`.
    """
    from primus.runtimes.slurm.batch_job import BatchJob, run_batch_job

    return run_batch_job(BatchJob(command=tuple(command), environ=environ, run=run, num_nodes=num_nodes, **restarts))


def find_size(options: Options) -> JobSize:
    """Nodes of `--nodes` (a range tells none), and devices of `--gpus-per-node`."""
    devices = (find_option_value(options.slurm_options, "gpus-per-node") or "").rpartition(":")[2]
    return JobSize(
        nodes=find_num_nodes(options.slurm_options),
        devices_per_node=int(devices) if devices.isdecimal() else None,
    )


def find_states(submissions: Sequence[Submission]) -> dict[str, JobState]:
    """States of jobs, by id."""
    from primus.runtimes.slurm import queries

    return queries.query_states(submissions)


def list_nodes(words: Sequence[str], environ: Mapping[str, str]) -> Sequence[ClusterNode]:
    """The nodes of the partition in `words`, or of the cluster."""
    from primus.runtimes.slurm import cluster_nodes

    return cluster_nodes.list_nodes(words, environ)


def select_node(words: Sequence[str], job: NodeJob) -> Sequence[str]:
    """`words` for a step on one node."""
    from primus.runtimes.slurm import cluster_nodes

    return cluster_nodes.select_node(words, job)


def cancel(submission: Submission) -> None:
    """Cancel a job."""
    from primus.runtimes.slurm import queries

    queries.cancel_job(submission)

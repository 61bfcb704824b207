"""Run on the nodes of a Slurm cluster (srun, sbatch)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from primus.errors import UsageError
from primus.launch.plan import Context, LaunchPlan
from primus.launch.policy import Policy
from primus.runtimes.slurm import script
from primus.runtimes.slurm.options import SPELLINGS, Options, parse, value_of

if TYPE_CHECKING:
    from primus.launch.jobs import JobState, Submission
    from primus.launch.remote import Remote, Say
    from primus.runs.store import Run

LEVEL = "cluster"

__all__ = ["LEVEL", "SPELLINGS", "Options", "after_step", "cancel", "parse", "start", "states", "wrap"]

OF_A_TERMINAL = ("input", "unbuffered", "wait")
"""Those that a step with a terminal (--pty) does without."""


def wrap(plan: LaunchPlan, options: Options, context: Context) -> LaunchPlan:
    """`plan` on each node of a step or of a job."""
    return _step(plan, options, context) if options.command == "srun" else _job(plan, options, context)


def _step(plan: LaunchPlan, options: Options, context: Context) -> LaunchPlan:
    given = {each.name for each in options.typed}
    ours = [
        option
        for option in script.step_options(with_workers=context.starts_workers)
        if (name := option[2:].partition("=")[0]) not in given and not ("pty" in given and name in OF_A_TERMINAL)
    ]
    return LaunchPlan(
        argv=("srun", *ours, *options.slurm, *context.there), env=plan.env, notes=_notes(plan, options), inner=plan
    )


def _job(plan: LaunchPlan, options: Options, context: Context) -> LaunchPlan:
    from primus.launch.chain import entry

    if options.is_array and ("--run", context.directory) in itertools.pairwise(context.there):
        raise UsageError(
            "slurm: --array cannot be used here: a run folder belongs to one job",
            "submit each by itself; an array is for tasks that share their work, such as data encode",
        )
    batch = script.Batch(
        options=options,
        run=context.directory,
        name=context.name,
        command=context.there,
        primus=entry(),
        has_workers=context.starts_workers,
    )
    file = f"{context.directory}/job.sh"
    _, others = script.placed(batch)
    # A variable of the user's such as SBATCH_PARTITION wins over the script, and gives way to the command line.
    is_overruled = any(name.startswith("SBATCH_") for name in context.environ) and "SLURM_JOB_ID" not in context.environ
    repeated = options.slurm if is_overruled else ()
    test = ("--test-only",) if options.test_only else ()
    policy = Policy(max_restarts=script.max_restarts(options), backoff_s=options.restart_delay)
    return LaunchPlan(
        argv=("sbatch", "--parsable", *test, *repeated, *others, file),
        env=plan.env,
        files={file: script.text(batch)},
        notes=_notes(plan, options),
        policy=policy,
        inner=plan,
    )


def _notes(plan: LaunchPlan, options: Options) -> tuple[str, ...]:
    """What does not reach the nodes, as the user's --export says."""
    export = value_of(options.typed, "export")
    if export is None or "ALL" in export.split(","):
        return ()
    named = {word.partition("=")[0] for word in export.split(",")}
    left = sorted(set(plan.env) - named)
    lost = f", such as {', '.join(left)}" if left else ""
    return (f"warning: --export={export} keeps this shell's variables and secrets from the job{lost}",)


def start(remote: Remote, run: Run | None, say: Say) -> int:
    """Run the step, or submit the job; gives the exit code."""
    from primus.runtimes.slurm import submit

    return submit.start(remote, run, say)


def after_step(run: Run, environ: Mapping[str, str], **step: Any) -> tuple[str, str]:
    """What follows a step of a batch job, and why; `step` is what `after.Step` has."""
    from primus.runtimes.slurm import after

    return after.after_step(run, after.Step(**step), environ)


def states(submissions: Sequence[Submission]) -> dict[str, JobState]:
    """How jobs stand, by id."""
    from primus.runtimes.slurm import queries

    return queries.states(submissions)


def cancel(submission: Submission) -> None:
    """End a job."""
    from primus.runtimes.slurm import queries

    queries.cancel(submission)

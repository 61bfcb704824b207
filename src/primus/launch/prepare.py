"""Plan a job on this node without touching anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from primus import interpreter, patch
from primus.errors import UsageError
from primus.launch import compose
from primus.launch.invocation import Invocation
from primus.plan import LaunchJob, LaunchPlan, LaunchRequest, PlanContext, Variable
from primus.runs.store import Run, create_run_id

if TYPE_CHECKING:
    from primus.engines.choice import EngineChoice
    from primus.engines.installation import EngineInstallation


class Launch(Struct, frozen=True, kw_only=True):
    """A job on this node, planned."""

    job: LaunchJob
    request: LaunchRequest
    command: tuple[str, ...]
    """Typed words."""
    directory: str
    """Run folder."""
    attempt: int
    plan: LaunchPlan
    context: PlanContext
    """Context of the plan, including settings of hooks and patches."""
    engine: EngineChoice | None = None
    """Engine of the workers, whose interpreter starts them; None for the interpreter of primus."""


def prepare_launch(invocation: Invocation) -> Launch:
    """Plan the job of `invocation` on this node without touching anything.

    Raises:
        UsageError: The job cannot run in this layout, must not start now, or an option is wrong.
        UnfitError: PyTorch cannot use the accelerators of this machine, or the engine of the backend cannot be used.
    """
    job = invocation.job
    assert job is not None
    if job.resume:
        run = Run(Path(job.resume).resolve())
        directory, attempt = run.directory, run.read_metadata().attempts
    else:
        directory, attempt = Path(job.workspace).absolute() / job.name / create_run_id(), 0
    launch = plan_attempt(job, invocation.request, invocation.words, invocation.plan_context, directory, attempt)
    if launch.plan.layout is not None and launch.plan.layout.node_rank == 0:  # other nodes join the run of node 0
        job.check_start()
    return launch


def plan_attempt(
    job: LaunchJob,
    request: LaunchRequest,
    command: tuple[str, ...],
    context: PlanContext,
    directory: Path,
    attempt: int,
) -> Launch:
    """`job` in the run folder `directory`, as its attempt number `attempt`."""
    engine = _choose_engine(job, context)
    python = engine.python if engine else context.python
    worker = interpreter.build_module_command(python, "primus.worker", str(directory), str(attempt))
    notes = (*job.notes, engine.note) if engine else job.notes
    folders = _list_import_folders(engine)
    innermost = LaunchPlan(argv=worker, env=job.env, notes=notes)
    context = structs.replace(context, patches=job.patches, directory=str(directory), attempt=attempt, name=job.name)
    context = structs.replace(context, workload=job.workload)
    seen = structs.replace(_view_as_workers(context, job), python=python, import_folders=folders)
    folded = compose.compose_plan(request, innermost, seen)
    if engine and engine.installation and engine.installation.place == "checkout":
        folded = structs.replace(folded, env=folded.env | _make_checkout_variable(engine.installation, folded, context))
    assert folded.layout is not None, "the chain ends on a node"
    job.check(folded.layout.world_size)
    workers = {**context.environ, **{name: variable.value for name, variable in folded.env.items()}}
    if job.device:
        from primus.machine import accelerators  # a task without workers runs in the launcher

        accelerators.check_launch(job.device, context.facts(folded.layout.master_of_several), workers, folders)
    if job.packages:
        from primus.launch.worker_packages import check_worker_packages  # for a run with a tracker only

        check_worker_packages(job.packages, engine, workers)
    patch.list_chosen_names(workers)  # rejects unknown names before anything starts
    return Launch(
        job=job,
        request=request,
        command=command,
        directory=str(directory),
        attempt=attempt,
        plan=folded,
        context=context,
        engine=engine,
    )


def _choose_engine(job: LaunchJob, context: PlanContext) -> EngineChoice | None:
    if not job.engines:
        return None
    from primus.engines.choice import choose_engine  # a job without an engine reads no files of engines

    environ = {**context.environ, **{name: variable.value for name, variable in job.env.items()}}
    return choose_engine(job.engines, environ, context.python, allows_any_version=job.allows_any_version)


def _list_import_folders(engine: EngineChoice | None) -> list[str] | None:
    """Import path of the workers; None for that of the launcher."""
    if engine is None or engine.installation is None:
        return None
    from primus.engines.installation import list_installation_folders

    return list_installation_folders(engine.installation)


def _make_checkout_variable(
    checkout: EngineInstallation, folded: LaunchPlan, context: PlanContext
) -> dict[str, Variable]:
    """PYTHONPATH with the checkout of an engine before the folders of the user."""
    planned = folded.env.get("PYTHONPATH")
    before = planned.value if planned else context.environ.get("PYTHONPATH", "")
    folders = f"{checkout.folder}:{before}" if before else checkout.folder
    return {"PYTHONPATH": Variable(folders, f"engine {checkout.engine}")}


def _view_as_workers(context: PlanContext, job: LaunchJob) -> PlanContext:
    """`context` with the machine as the workers use it: without accelerators if they run on the CPU."""
    if job.device != "cpu":
        return context
    from primus.machine import accelerators

    return structs.replace(context, facts=lambda master: accelerators.hide_accelerators(context.facts(master)))


def amend_launch(launch: Launch, env: Mapping[str, Variable], extra: tuple[str, ...]) -> Launch:
    """`launch` with variables and words that hooks and patches add; settings of the user take precedence.

    Raises:
        UsageError: The words are not settings of the experiment, or the job cannot run with them.
    """
    job = launch.job
    if extra:
        if job.amend is None:
            raise UsageError(f"task '{launch.request.task}' does not accept settings from hooks: {extra[0]}")
        job = structs.replace(job.amend(extra), resume=job.resume)
    context = structs.replace(launch.context, settings={**launch.context.settings, **env})
    return plan_attempt(job, launch.request, launch.command, context, Path(launch.directory), launch.attempt)

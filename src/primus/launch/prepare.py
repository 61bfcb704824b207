"""Plan a command without touching anything: its runtimes wrap the plan of its task, innermost first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from primus import interpreter, package_files, registry
from primus.errors import UsageError
from primus.launch.command import NODE_END, Command, GlobalOptions, parse_segment_options
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import MachineFacts
from primus.plan import LaunchJob, LaunchPlan, PlanContext, Variable
from primus.runs.store import Run, create_run_id
from primus.runtime import RUNTIMES, LaunchRequest, RequestSegment
from primus.task import Task, TaskContext

if TYPE_CHECKING:
    from primus.engines.choice import EngineChoice
    from primus.engines.installation import EngineInstallation


class Invocation(Struct, frozen=True, kw_only=True):
    """A parsed command line with its task and the facts of the machine that it was typed on."""

    command: Command
    """The command, including defaults of the launcher files."""
    words: tuple[str, ...]
    """The command line as typed."""
    task: Task
    options: Any
    """Options of the task."""
    parse_task_words: Callable[[Sequence[str]], tuple[Any, tuple[str, ...]]]
    """Parses the words of the task into options and overrides; hooks may add words."""
    job: LaunchJob | None
    """The job that the task describes; None if it needs no worker processes."""
    task_context: TaskContext
    plan_context: PlanContext

    @property
    def request(self) -> LaunchRequest:
        return self.command.request

    def make_task_context(self, layout: ClusterLayout | None) -> TaskContext:
        """The context of the task on a node of `layout`: the facts then include the route to the master."""
        master = layout.master_of_several if layout else None
        return structs.replace(self.task_context, layout=layout, facts=lambda: self.plan_context.facts(master))


class Launch(Struct, frozen=True, kw_only=True):
    """A job on this node, planned."""

    job: LaunchJob
    request: LaunchRequest
    command: tuple[str, ...]
    """Typed words."""
    directory: str
    """Run folder."""
    attempt: int
    context: PlanContext
    """Context of the plan, including settings of hooks and patches."""
    engine: EngineChoice | None = None
    """Engine of the workers, whose interpreter starts them; None for the interpreter of primus."""
    plan: LaunchPlan = LaunchPlan(argv=())

    def make_environ(self) -> dict[str, str]:
        """Variables of the workers."""
        return {**self.context.environ, **{name: variable.value for name, variable in self.plan.env.items()}}


def prepare_launch(invocation: Invocation) -> Launch:
    """Plan the job of `invocation` on this node without touching anything.

    Raises:
        UsageError: The job cannot run in this layout, must not start now, or an option is wrong.
        UnfitError: PyTorch cannot use the accelerators of this machine, or the engine of the framework cannot be used.
    """
    job = invocation.job
    assert job is not None
    if job.resume:
        run = Run(Path(job.resume).resolve())
        directory, attempt = run.directory, run.read_metadata().attempts
    else:
        directory, attempt = Path(job.workspace).absolute() / job.name / create_run_id(), 0
    launch = plan_attempt(
        Launch(
            job=job,
            request=invocation.request,
            command=invocation.words,
            directory=str(directory),
            attempt=attempt,
            context=invocation.plan_context,
            engine=_choose_engine(job, invocation.plan_context),
        )
    )
    layout = launch.plan.layout
    assert layout is not None, "the chain ends on a node"
    has_devices = job.device in ("cpu", "cuda") or launch.context.gpu_facts().devices
    problem = None if has_devices else job.find_cpu_problem()
    if problem and not invocation.command.options.dry_run:
        raise problem
    if problem:
        note = f"this machine has no AMD or NVIDIA GPU and cannot train it: {problem.problem}"
        launch = structs.replace(launch, plan=structs.replace(launch.plan, notes=(*launch.plan.notes, note)))
    if layout.node_rank == 0:  # other nodes join the run of node 0
        job.check_start()
    return launch


def plan_attempt(launch: Launch) -> Launch:
    """`launch` with the plan of its attempt: the runtimes around one worker of its job."""
    job, engine, context = launch.job, launch.engine, launch.context
    python = engine.python if engine else context.python
    worker = interpreter.build_module_command(python, "primus.worker", launch.directory, str(launch.attempt))
    notes = (*job.notes, engine.note) if engine else job.notes
    actions = (engine.make_action(),) if engine and engine.installation is None else ()
    folders = _list_import_folders(engine.installation) if engine and engine.installation else None
    innermost = LaunchPlan(argv=worker, env=job.env, notes=notes, actions=actions)
    context = structs.replace(
        context,
        patches=job.patches,
        directory=launch.directory,
        attempt=launch.attempt,
        name=job.name,
        workload=job.workload,
    )
    seen = structs.replace(context, python=python, import_folders=folders)
    if job.device == "cpu":
        seen = _hide_devices(seen)
    folded = wrap_on_node(launch.request, innermost, seen)
    if engine and engine.installation and engine.installation.place == "checkout":
        folded = structs.replace(folded, env=folded.env | _make_checkout_variable(engine.installation, folded, context))
    assert folded.layout is not None, "the chain ends on a node"
    job.check(folded.layout.world_size)
    planned = structs.replace(launch, plan=folded, context=context)
    workers = planned.make_environ()
    if job.device == "cuda" or (job.device == "auto" and context.gpu_facts().devices):
        from primus.machine import accelerators  # a machine without devices trains on its CPU

        accelerators.check_launch(job.device, context.facts(folded.layout.master_of_several), workers, folders)
    if job.packages:
        from primus.launch.worker_packages import check_worker_packages  # for a run with a tracker only

        check_worker_packages(job.packages, engine, workers)
    from primus import patch  # only for what starts workers

    if patch.VARIABLE in workers:
        patch.list_chosen_names(workers)  # rejects unknown names before anything starts
    return planned


def _choose_engine(job: LaunchJob, context: PlanContext) -> EngineChoice | None:
    if not job.engines:
        return None
    from primus.engines.choice import choose_engine  # a job without an engine reads no files of engines

    environ = {**context.environ, **{name: variable.value for name, variable in job.env.items()}}
    return choose_engine(job.engines, environ, context.python, allows_any_version=job.allows_any_version)


def _list_import_folders(installation: EngineInstallation) -> list[str]:
    """Import path of workers that use the engine."""
    from primus.engines.installation import list_installation_folders  # not for a job without an engine

    return list_installation_folders(installation)


def _make_checkout_variable(
    checkout: EngineInstallation, folded: LaunchPlan, context: PlanContext
) -> dict[str, Variable]:
    """PYTHONPATH with the checkout of an engine before the folders of the user."""
    planned = folded.env.get("PYTHONPATH")
    before = planned.value if planned else context.environ.get("PYTHONPATH", "")
    folders = f"{checkout.folder}:{before}" if before else checkout.folder
    return {"PYTHONPATH": Variable(folders, f"engine {checkout.engine}")}


def _hide_devices(context: PlanContext) -> PlanContext:
    """`context` with the machine as workers on the CPU use it: without accelerators."""
    return structs.replace(
        context,
        gpu_facts=MachineFacts,
        facts=lambda master: structs.replace(context.facts(master), devices=(), links=()),
    )


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
    is_same = (job.engines, job.env) == (launch.job.engines, launch.job.env)
    engine = launch.engine if is_same else _choose_engine(job, context)
    return plan_attempt(structs.replace(launch, job=job, context=context, engine=engine))


def wrap_on_node(request: LaunchRequest, plan: LaunchPlan, context: PlanContext) -> LaunchPlan:
    """Wrap `plan` in the runtime of this node, the last of the request; those around it have been left.

    Raises:
        UsageError: An option of the runtime is wrong.
    """
    segment = request.runtimes[-1]
    return registry.load_plug_in(RUNTIMES, segment.name).wrap(plan, parse_segment_options(segment), context)


def compose_outer_plan(
    request: LaunchRequest, context: PlanContext, env: Mapping[str, Variable], given: GlobalOptions
) -> LaunchPlan:
    """Compose the plan of the runtimes outside of the node level; inside them `primus-cli` runs the rest of the chain.

    Args:
        env: Variables that are passed by name to the rest of the chain.
        given: Global options, which also apply there.

    Raises:
        UsageError: An option of a runtime is wrong.
    """
    num_outer = sum(registry.load_plug_in(RUNTIMES, segment.name).LEVEL != "node" for segment in request.runtimes)
    passed_on = tuple(f"--{name.replace('_', '-')}" for name in ("debug", "json", "no_config") if getattr(given, name))
    plan = LaunchPlan(argv=_make_remote_command(request, num_outer, passed_on), env=dict(env))
    for number, segment in reversed(list(enumerate(request.runtimes[:num_outer]))):
        runtime = registry.load_plug_in(RUNTIMES, segment.name)
        if plan.step_options and not runtime.STARTS_CONTAINERS:
            raise UsageError(f"'{segment.name}' cannot start this container: srun does", "use another --engine")
        # srun starts such a container, so that nothing of its level is left to do on the nodes.
        there = plan.argv if plan.step_options else _make_remote_command(request, number + 1, passed_on)
        level = structs.replace(context, is_here=number == 0, there=there)
        plan = runtime.wrap(plan, parse_segment_options(segment), level)
    return plan


def _make_remote_command(request: LaunchRequest, first: int, passed_on: tuple[str, ...]) -> tuple[str, ...]:
    """The command that runs the chain from runtime number `first` on."""
    runtimes = request.runtimes[first:] or (RequestSegment(NODE_END),)
    words = [word for segment in runtimes for word in (segment.name, *segment.words, "--")]
    if registry.load_plug_in(RUNTIMES, runtimes[-1].name).LEVEL != "node":
        words += [NODE_END, "--"]
    return (find_entry_point(), *passed_on, *words, *request.task.split(), *request.words)


def find_entry_point() -> str:
    """Path of the `primus-cli` that other nodes and containers start: the checkout's, else the installed one."""
    if package_files.CHECKOUT is not None:
        return str(package_files.CHECKOUT / "primus-cli")
    installed = Path(sys.prefix) / "bin" / "primus-cli"
    return str(installed if installed.is_file() else "primus-cli")

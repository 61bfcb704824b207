"""Run in a container of docker, podman or apptainer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from primus.machine.host.kernel_counters import describe_oom, read_oom_kills
from primus.plan import LaunchPlan, PlanContext
from primus.runs.store import Run, create_run_id
from primus.runtimes.container import container_plan, engines
from primus.runtimes.container.options import ContainerArguments, Options, find_misspelled_option, parse
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.runtime import RemoteLaunch
    from primus.runtimes.container.lifecycle import ContainerLaunch

__all__ = ["COMMANDS", "LEVEL", "Options", "parse", "run", "start", "wrap"]

LEVEL = "container"
COMMANDS = ("--shell", "--clean")
"""Options that need no task."""


def wrap(plan: LaunchPlan, options: ContainerArguments, context: PlanContext) -> LaunchPlan:
    """`plan` in a container.

    Raises:
        UsageError: An option is invalid, or no image is given.
    """
    return container_plan.plan_container(plan, options, context)[0]


def start(remote: RemoteLaunch, run: Run | None, say: Callable[[str], None]) -> int:
    """Run the container until it ends; gives the exit code.

    Raises:
        PrimusError: The container cannot be started.
    """
    from primus.launch.run_remote import conclude_remote
    from primus.runtimes.container import lifecycle

    options = container_plan.limit_shell_grace(parse(remote.request.runtimes[0].words))
    container, _ = container_plan.build_container(options, remote.context)
    for note in remote.plan.notes:
        if note.startswith(container_plan.PRINTED_NOTES):
            say(note)
    launch = _build_container_launch(container, options, remote.context.environ, remote.plan, run, say)
    before, kills = run.read_metadata() if run else None, read_oom_kills()
    code = lifecycle.run_container(launch, remote.plan.argv, removes_ended=options.clean)
    if options.shell or container.rank:
        return code
    reason = f"{container.engine.program} exited with code {code}"
    if code == 128 + signal.SIGKILL:  # the launcher inside was killed; a killed rank is reported by the launcher
        cause = describe_oom(kills, read_oom_kills())
        reason += f": the task in the container was killed{', ' * bool(cause)}{cause}"
        if run is None:
            say(reason)
    return conclude_remote(run, before, code, reason)


def run(options: ContainerArguments, here: TaskContext) -> int:
    """Open a shell, or remove ended containers, without a task.

    Raises:
        PrimusError: The engine cannot be used.
    """
    from primus.plan import format_plan, redact_plan
    from primus.runtimes.container import launched_containers, lifecycle

    options = container_plan.limit_shell_grace(options)
    if not options.shell:
        engine = engines.choose_engine(options, options.image or "", here.environ, is_here=True)
        if here.dry_run:
            here.say(f"would remove your ended {engine.program} containers on this host that primus has started")
            return 0
        launched_containers.remove_ended_containers(
            engine, container_plan.build_client_environ(engine, here.environ, {}), here.say
        )
        return 0
    context = PlanContext(
        environ=here.environ,
        python=sys.executable,
        facts=lambda master: here.facts(),
        starts_workers=False,
        directory=os.path.join(os.getcwd(), create_run_id()),
    )
    plan, container = container_plan.plan_container(LaunchPlan(argv=()), options, context)
    if here.dry_run:
        here.result(redact_plan(plan), format_plan(plan))
        return 0
    launch = _build_container_launch(container, options, here.environ, plan, None, here.say)
    return lifecycle.run_container(launch, plan.argv, removes_ended=options.clean)


def _build_container_launch(
    container: engines.ContainerSpec,
    options: ContainerArguments,
    environ: Mapping[str, str],
    plan: LaunchPlan,
    run: Run | None,
    say: Callable[[str], None],
) -> ContainerLaunch:
    from primus.runtimes.container import lifecycle

    return lifecycle.ContainerLaunch(
        container=container,
        environ=container_plan.build_client_environ(container.engine, environ, plan.env),
        grace_s=options.grace,
        run=run,
        say=say,
        doubt=find_misspelled_option(options.passed),
    )

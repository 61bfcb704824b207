"""Run in a container of docker, podman or apptainer."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from primus.launch.plan import Context, LaunchPlan
from primus.machine.oom import describe_oom, read_oom_kills
from primus.runs.store import Run, new_id
from primus.runtimes.container import engines, planning
from primus.runtimes.container.options import Options, Typed, misspelt, parse
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.launch.remote import Remote
    from primus.runtimes.container.lifecycle import Scene

__all__ = ["COMMANDS", "LEVEL", "Options", "parse", "run", "start", "wrap"]

LEVEL = "container"
COMMANDS = ("--shell", "--clean")
"""Options that need no task."""


def wrap(plan: LaunchPlan, options: Typed, context: Context) -> LaunchPlan:
    """`plan`, in a container.

    Raises:
        UsageError: An option is wrong, or there is no image.
    """
    return planning.planned(plan, options, context)[0]


def start(remote: Remote, run: Run | None, say: Callable[[str], None]) -> int:
    """Run the container to its end; gives the exit code.

    Raises:
        PrimusError: It cannot be started.
    """
    from primus.launch.remote import conclude
    from primus.runtimes.container import lifecycle

    options = planning.limited(parse(remote.request.runtimes[0].words))
    container, _ = planning.container_of(options, remote.context)
    for note in remote.plan.notes:
        if note.startswith(planning.SAID):
            say(note)
    scene = _scene(container, options, remote.context.environ, remote.plan, run, say)
    before, kills = run.metadata() if run else None, read_oom_kills()
    code = lifecycle.perform(scene, remote.plan.argv, removes_ended=options.clean)
    if options.shell or container.rank:
        return code
    reason = f"{container.engine.program} ended with exit code {code}"
    if code == 128 + signal.SIGKILL:  # of the launcher inside: of a rank the launcher says it
        said = describe_oom(kills, read_oom_kills())
        reason += f": what ran in the container was killed{', ' * bool(said)}{said}"
        if run is None:
            say(reason)
    return conclude(run, before, code, reason)


def run(options: Typed, here: TaskContext) -> int:
    """Open a shell, or remove ended containers, without a task.

    Raises:
        PrimusError: The engine cannot be used.
    """
    from primus.launch import show
    from primus.launch.plan import shown
    from primus.runtimes.container import lifecycle, started

    options = planning.limited(options)
    if not options.shell:
        engine = engines.choose(options, options.image or "", here.environ, is_here=True)
        if here.dry_run:
            here.say(f"would remove your ended containers of {engine.program} here that primus has started")
            return 0
        started.clean(engine, planning.client_environ(engine, here.environ, {}), here.say)
        return 0
    context = Context(
        environ=here.environ,
        python=sys.executable,
        facts=lambda master: here.facts(),
        starts_workers=False,
        directory=os.path.join(os.getcwd(), new_id()),
    )
    plan, container = planning.planned(LaunchPlan(argv=()), options, context)
    if here.dry_run:
        here.result(shown(plan), show.text(plan))
        return 0
    scene = _scene(container, options, here.environ, plan, None, here.say)
    return lifecycle.perform(scene, plan.argv, removes_ended=options.clean)


def _scene(
    container: engines.Container,
    options: Typed,
    environ: Mapping[str, str],
    plan: LaunchPlan,
    run: Run | None,
    say: Callable[[str], None],
) -> Scene:
    from primus.runtimes.container import lifecycle

    return lifecycle.Scene(
        container=container,
        environ=planning.client_environ(container.engine, environ, plan.env),
        grace_s=options.grace,
        run=run,
        say=say,
        doubt=misspelt(options.passed),
    )

"""Run a task that needs no workers in this process, with its hooks and patches around it."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError
from primus.launch.prepare import Invocation, wrap_on_node
from primus.machine.cluster import ClusterLayout
from primus.plan import Action, LaunchPlan, extends_list
from primus.runs.store import RunOutcome
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.launch.hooks.runner import HookResult


def plan_inline(invocation: Invocation) -> LaunchPlan:
    """The plan of a task that runs in this process; touches nothing.

    Raises:
        UsageError: An option of a runtime is wrong.
    """
    request = invocation.request
    argv = ("primus-cli", "direct", "--", *request.task.split(), *request.words)
    task, plan = invocation.task, LaunchPlan(argv=argv, notes=("runs in this process (no workers)",))
    plan = structs.replace(wrap_on_node(request, plan, invocation.plan_context), argv=argv)
    if task.plan_notes and invocation.command.options.dry_run:
        notes = task.plan_notes(invocation.options, invocation.make_task_context(plan.layout))
        plan = structs.replace(plan, notes=(*plan.notes, *notes))
    return structs.replace(plan, actions=()) if invocation.task.SHOWS_PATCHES else plan


def run_inline(invocation: Invocation, plan: LaunchPlan) -> int:
    """Run the hooks, the task and the hooks that follow it; gives the task's exit code.

    Variables of `--env` are set in this process, because the task runs in it.

    Raises:
        PrimusError: A hook, a patch or the task fails.
    """
    context = invocation.make_task_context(plan.layout)
    typed = {name: variable for name, variable in plan.env.items() if variable.source.startswith("--env")}
    context = structs.replace(context, variables=typed, shell=dict(context.environ))
    os.environ.update({name: variable.value for name, variable in typed.items()})
    if plan.actions:
        return _run_with_hooks(invocation, plan.actions, context)
    return invocation.task.run(invocation.options, context) or EXIT_OK


def _run_with_hooks(invocation: Invocation, actions: tuple[Action, ...], context: TaskContext) -> int:
    """Run the task between its hooks; settings of the user take precedence over those of hooks."""
    import signal  # imported here, because most tasks have no hooks
    import tempfile

    from primus.launch.hooks import runner
    from primus.launch.signals import find_exit_code, raise_on_signals

    request, words, users = invocation.request, list(invocation.request.words), frozenset(os.environ)

    def accept(result: HookResult) -> list[str]:
        kept = [name for name, each in result.env.items() if name in users and not _extends(name, each.value)]
        os.environ.update({name: each.value for name, each in result.env.items() if name not in kept})
        words[:0] = result.extra  # before the user's words, which take precedence
        invocation.parse_task_words(words)
        return [f"{name}: the value set by the user is kept" for name in kept]

    # Kept for an exception that no clause below handles, so that the hooks of the stage `failure` run.
    outcome = RunOutcome(state="failed", exit_code=EXIT_FAILED, reason="an error in primus itself")
    with tempfile.TemporaryDirectory(prefix="primus-hooks-") as logs:
        hook_context = runner.HookContextFacts(
            task=request.task,
            words=request.words,
            layout=context.layout or ClusterLayout(nproc=1),
            python=invocation.plan_context.python,
            logs=Path(logs),
            say=partial(print, file=sys.stderr, flush=True),
        )
        try:
            runner.run_before_hooks(actions, hook_context, lambda: os.environ, accept)
            options, overrides = invocation.parse_task_words(words)
            with raise_on_signals():  # so that the hooks after the task run when it is terminated
                code = int(invocation.task.run(options, structs.replace(context, overrides=overrides)) or EXIT_OK)
            outcome = RunOutcome(state="failed" if code else "done", exit_code=code)
        except PrimusError as error:
            outcome = runner.build_failure_outcome(error)
            raise
        except KeyboardInterrupt as error:
            code = find_exit_code(error)
            outcome = RunOutcome(state="interrupted", exit_code=code, reason=signal.Signals(code - 128).name)
            raise
        finally:
            # In `finally`, because hooks release what `before` hooks have acquired.
            runner.run_after_hooks(actions, hook_context, os.environ, outcome)
    return code


def _extends(name: str, value: str) -> bool:
    return extends_list(name, value, os.environ[name])

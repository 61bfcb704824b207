"""Run a parsed command: build its invocation, choose the executor, report how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from primus import registry
from primus.config import flags
from primus.errors import EXIT_OK, PrimusError
from primus.launch.command import Command, parse_segment_options
from primus.launch.prepare import Invocation, Launch, prepare_launch
from primus.machine.cluster import JobSize
from primus.plan import LaunchPlan, PlanContext, format_plan, redact_plan
from primus.runs.files import UNFIT_NODES_VARIABLE, find_unfit_nodes_folder, to_json
from primus.runtime import RUNTIMES, LaunchRequest
from primus.task import TASKS, Task, TaskContext

if TYPE_CHECKING:
    from primus.machine.probe import MachineReader
    from primus.runs.unfit_nodes import UnfitNodes


class CommandPlan(Struct, frozen=True, kw_only=True):
    """What a command would do."""

    plan: LaunchPlan
    text: str
    """The plan, human-readable, as the runtime shows it."""
    is_text_only: bool = False
    """Whether a dry run prints the text under `--json`, too."""


def plan_command(command: Command, words: tuple[str, ...], environ: Mapping[str, str]) -> CommandPlan:
    """Plan a dry run of `command`, parsed from `words`; touches nothing.

    Raises:
        PrimusError: An option is wrong, or the task cannot run here.
    """
    assert command.options.dry_run
    invocation = _make_invocation(command, words, environ)
    if invocation.task_context.runs_elsewhere:
        return _plan_remotely(invocation)
    if invocation.job:
        launch = prepare_launch(invocation)
        return _describe_plan(launch.plan, command, f"run folder: {launch.directory}")
    from primus.launch.run_inline import plan_inline

    return _describe_plan(structs.replace(plan_inline(invocation), layout=None), command)


def run_command(command: Command, words: tuple[str, ...], environ: Mapping[str, str]) -> int:
    """Run `command`, parsed from `words`; gives the exit code.

    Raises:
        PrimusError: An option is wrong, or the task fails.
    """
    for segment in command.request.runtimes:
        parse_segment_options(segment)
    if not command.request.task:
        return _run_runtime_command(command, environ)
    if command.options.dry_run:
        planned = plan_command(command, words, environ)
        is_json = command.options.json and not planned.is_text_only
        print(to_json(redact_plan(planned.plan)) if is_json else planned.text)
        return EXIT_OK
    launch = None
    try:
        invocation = _make_invocation(command, words, environ)
        if invocation.job and not invocation.task_context.runs_elsewhere:
            launch = prepare_launch(invocation)
    except PrimusError as error:
        from primus.launch.planning_failure import record_planning_failure

        record_planning_failure(error, command.request.words, environ)
        raise
    if invocation.task_context.runs_elsewhere:
        return _run_remotely(invocation)
    return _run_with_workers(invocation, launch) if launch else _run_in_this_process(invocation)


def _run_runtime_command(command: Command, environ: Mapping[str, str]) -> int:
    """Run a command of a runtime that needs no task, such as `kubernetes list`."""
    segment, given = command.request.runtimes[-1], command.options
    runtime = registry.load_plug_in(RUNTIMES, segment.name)
    facts = cache(lambda: _open_machine(environ, given.dry_run).read_facts())
    context = TaskContext(environ=environ, json=given.json, dry_run=given.dry_run, facts=facts)
    return runtime.run(parse_segment_options(segment), context) or EXIT_OK


def _find_size(request: LaunchRequest) -> JobSize:
    """What the runtimes ask for; an inner one has the last word, since it starts the processes."""
    found = [
        registry.load_plug_in(RUNTIMES, each.name).find_size(parse_segment_options(each)) for each in request.runtimes
    ]
    return JobSize(
        nodes=next((each.nodes for each in reversed(found) if each.nodes), None),
        devices_per_node=next((each.devices_per_node for each in reversed(found) if each.devices_per_node), None),
    )


def _make_invocation(command: Command, words: tuple[str, ...], environ: Mapping[str, str]) -> Invocation:
    request, given = command.request, command.options
    task, innermost = registry.load_plug_in(TASKS, request.task), request.runtimes[-1]
    options, overrides = parse_task_words(task, request, request.words)
    machine = cache(partial(_open_machine, environ, given.dry_run))
    facts = cache(lambda master: machine().read_facts(master))
    task_context = TaskContext(
        environ=environ,
        json=given.json,
        runs_elsewhere=registry.load_plug_in(RUNTIMES, request.runtimes[0].name).LEVEL != "node",
        dry_run=given.dry_run,
        overrides=overrides,
        facts=lambda: facts(None),
        patches=registry.load_plug_in(RUNTIMES, innermost.name).list_patch_files(parse_segment_options(innermost)),
        runtime_words=innermost.words,
        find_size=partial(_find_size, request),
    )
    job = task.prepare(options, task_context) if task.prepare else None

    @cache
    def find_hooks() -> tuple[Any, ...]:
        from primus.launch.hooks import discovery

        framework = job.framework if job else None
        return discovery.find_hooks(request.task, environ, starts_workers=job is not None, framework=framework)

    def find_unfit_nodes(given: str | None) -> UnfitNodes | None:
        ours = environ if given is None else {**environ, UNFIT_NODES_VARIABLE: given}
        folder = find_unfit_nodes_folder(ours)
        if folder is None or not (UNFIT_NODES_VARIABLE in ours or os.path.isdir(folder)):
            return None
        from primus.runs.unfit_nodes import read_unfit_nodes  # most users have no list

        return read_unfit_nodes(ours)

    plan_context = PlanContext(
        environ=environ,
        python=sys.executable,
        gpu_facts=lambda: machine().gpu_facts,
        facts=facts,
        find_unfit_nodes=find_unfit_nodes,
        terminal=os.ttyname(sys.stderr.fileno()) if sys.stderr.isatty() else None,
        starts_workers=job is not None,
        hooks=find_hooks,
    )
    return Invocation(
        command=command,
        words=words,
        task=task,
        options=options,
        parse_task_words=partial(parse_task_words, task, request),
        job=job,
        task_context=task_context,
        plan_context=plan_context,
    )


def parse_task_words(task: Task, request: LaunchRequest, words: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The options of a task, and the words that override keys of its experiment."""

    def check_extra(extra: list[str]) -> None:
        from primus.cli import stray_arguments

        stray_arguments.check(extra, task, request)

    options, extra = flags.parse_options(
        task.choose_options(words),
        words,
        f"task '{request.task}'",
        extra=task.OVERRIDES or task.PASSES_WORDS,
        check_extra=None if task.PASSES_WORDS else check_extra,
    )
    return options, tuple(extra)


def _open_machine(environ: Mapping[str, str], is_dry_run: bool) -> MachineReader:
    """The machine. A dry run reads files only: it runs no tool and resolves no name."""
    from primus.machine.probe import MachineReader, find_machine_root  # only where something depends on the machine

    return MachineReader(find_machine_root(environ), environ, "never" if is_dry_run else None)


def _run_with_workers(invocation: Invocation, launch: Launch) -> int:
    """Run the task, which starts the workers; gives the exit code of the task."""
    for note in launch.plan.notes:
        if note.startswith(("warning: ", "tuned: ")):
            print(f"primus-cli: {note}", file=sys.stderr)
    from primus.launch import run_node

    with ExitStack() as leaving:  # run_node adds the exit barrier: the nodes leave together after the last message
        context = invocation.make_task_context(launch.plan.layout)
        start = partial(run_node.run_node, launch, context.say, leaving)
        return invocation.task.run(invocation.options, structs.replace(context, launch=start)) or EXIT_OK


def _run_in_this_process(invocation: Invocation) -> int:
    from primus.launch.run_inline import plan_inline, run_inline

    return run_inline(invocation, plan_inline(invocation))


def _run_remotely(invocation: Invocation) -> int:
    """Run the task in a container or on other machines."""
    from primus.launch import run_remote

    return run_remote.run_remote(run_remote.prepare_remote(invocation), invocation.task_context.say)


def _plan_remotely(invocation: Invocation) -> CommandPlan:
    """The plan of a task in a container or on other machines."""
    from primus.launch import run_remote

    command = invocation.command
    remote = run_remote.prepare_remote(invocation)
    runtime = registry.load_plug_in(RUNTIMES, command.request.runtimes[0].name)
    task = invocation.task
    if task.plan_notes and task.PLANS_ELSEWHERE:
        notes = (*remote.plan.notes, *task.plan_notes(invocation.options, invocation.task_context))
        remote = structs.replace(remote, plan=structs.replace(remote.plan, notes=notes))
    if runtime.format_plan:
        return CommandPlan(plan=remote.plan, text=runtime.format_plan(remote), is_text_only=True)
    return _describe_plan(remote.plan, command, *([f"run folder: {remote.directory}"] if remote.needs_folder else []))


def _describe_plan(plan: LaunchPlan, command: Command, *more: str) -> CommandPlan:
    plan = structs.replace(plan, notes=(*plan.notes, *command.notes))
    return CommandPlan(plan=plan, text="\n".join([format_plan(plan), *more]))

"""`primus-cli <runtime> [options] [-- <runtime> [options]] -- <task> [options]`: words in, exit code out."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from primus import __version__, redaction, registry
from primus.config import flags
from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError, UsageError, escape_controls, format_error_place
from primus.interpreter import exclude_working_folder
from primus.launch import compose, launcher_file, show
from primus.launch.hooks import discovery
from primus.launch.plan import Action, LaunchJob, LaunchPlan, PlanContext, extends_list, redact_plan
from primus.launch.prepare import prepare_launch
from primus.launch.request import LaunchRequest
from primus.launch.signals import find_exit_code
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import MachineFacts
from primus.redaction import redact_args
from primus.runs.files import to_json
from primus.runtime import RUNTIMES
from primus.task import TASKS, Task, TaskContext

if TYPE_CHECKING:
    from primus.launch.hooks.runner import HookResult


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `primus-cli`; gives the exit code."""
    if argv is None:
        exclude_working_folder()
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with redaction.scope(), redaction.redirected_streams():
        redaction.learn(os.environ)
        redaction.learn_args(words)
        return _run_and_report_errors(words)


def _run_and_report_errors(words: list[str]) -> int:
    """The exit code; every error is one message, or with `--debug` a traceback."""
    is_debug = "--debug" in words
    try:
        code = _run_command(words, os.environ)
        sys.stdout.flush()
        return code
    except PrimusError as error:
        if is_debug:
            traceback.print_exc()
            return error.exit_code
        print(f"primus-cli: {escape_controls(_redact_words(str(error), words))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return EXIT_OK
    except KeyboardInterrupt as error:
        print("primus-cli: interrupted", file=sys.stderr)
        return find_exit_code(error)
    except Exception as error:
        if is_debug:
            traceback.print_exc()
            return EXIT_FAILED
        print(f"primus-cli: {escape_controls(_redact_words(_format_unexpected_error(error), words))}", file=sys.stderr)
        return EXIT_FAILED


def _format_unexpected_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    what = f"{type(error).__name__}: {error}"
    plug_in = registry.find_failing_plug_in(error)
    if plug_in and plug_in.is_origin:
        return f"the plug-in {plug_in.place} failed: {what}\n  run again with --debug for the whole traceback"
    problem = f"internal error at {format_error_place(error)}: {what}"
    if plug_in:
        return f"{problem}\n  the plug-in {plug_in.place} called it; run again with --debug for the whole traceback"
    return f"{problem}\n  run again with --debug for the whole traceback, and report it"


def _redact_words(text: str, words: Sequence[str]) -> str:
    """`text` with each word of the command line that holds a secret masked."""
    for word, shown_word in zip(words, redact_args(words), strict=True):
        text = text.replace(word, shown_word) if word != shown_word else text
    return text


def _run_command(words: list[str], environ: Mapping[str, str]) -> int:
    unreadable = [word for word in words if not word.isascii() and not _is_unicode(word)]
    if unreadable:
        raise UsageError(f"{unreadable[0]!r} is not UTF-8 text")
    ours, choice = launcher_file.take_choice(words)
    first = next((word for word in ours if word not in compose.GLOBAL_WORDS), "--help")
    if first in ("-h", "--help", "help"):
        from primus.cli import help_text

        print(help_text.format_overview())
        return EXIT_OK
    if first == "--version":
        print(f"primus {__version__}")
        return EXIT_OK
    command = compose.parse_command(ours)
    if command.is_help:
        from primus.cli import help_text

        print(help_text.format_help(command.request))
        return EXIT_OK
    return _dispatch_task(launcher_file.apply_defaults(command, choice, environ), tuple(words), environ)


def _dispatch_task(command: compose.Command, words: tuple[str, ...], environ: Mapping[str, str]) -> int:
    request, given = command.request, command.options
    for segment in request.runtimes:
        compose.parse_segment_options(segment)
    if not request.task:
        runtime = registry.load_plug_in(RUNTIMES, request.runtimes[-1].name)
        facts = partial(_read_facts(environ, given.dry_run), None)
        here = TaskContext(environ=environ, json=given.json, dry_run=given.dry_run, facts=facts)
        return runtime.run(compose.parse_segment_options(request.runtimes[-1]), here) or EXIT_OK
    task = registry.load_plug_in(TASKS, request.task)
    options, extra = _parse_task_options(task, request, request.words)
    context = _make_context(environ, given.dry_run)
    for_task = TaskContext(
        environ=environ,
        json=given.json,
        dry_run=given.dry_run,
        overrides=extra,
        facts=lambda: context.facts(None),
        patches=_list_patch_files(request),
    )
    job = task.prepare(options, for_task) if task.prepare else None
    starts_workers = job is not None
    framework = job.framework if job else None
    find_hooks = cache(
        lambda: discovery.find_hooks(request.task, environ, starts_workers=starts_workers, framework=framework)
    )
    context = structs.replace(context, starts_workers=starts_workers, hooks=find_hooks)
    if registry.load_plug_in(RUNTIMES, request.runtimes[0].name).LEVEL != "node":
        return _run_remotely(command, words, job, for_task, context)
    if job is None:
        return _run_in_this_process(command, task, options, for_task, context)
    return _run_with_workers(command, words, job, task, options, for_task, context)


def _list_patch_files(request: LaunchRequest) -> tuple[str, ...]:
    innermost = request.runtimes[-1]
    runtime = registry.load_plug_in(RUNTIMES, innermost.name)
    return runtime.list_patch_files(compose.parse_segment_options(innermost))


def _parse_task_options(task: Task, request: LaunchRequest, words: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The options of a task, and the words that change its experiment."""

    def check_extra(extra: list[str]) -> None:
        from primus.cli import stray_arguments

        stray_arguments.check(extra, task, request)

    options, extra = flags.parse_options(
        task.Options, words, f"task '{request.task}'", extra=task.OVERRIDES, check_extra=check_extra
    )

    return options, tuple(extra)


def _is_unicode(word: str) -> bool:
    try:
        return bool(word.encode())
    except UnicodeEncodeError:
        return False


def _make_context(environ: Mapping[str, str], is_dry_run: bool) -> PlanContext:
    terminal = os.ttyname(sys.stderr.fileno()) if sys.stderr.isatty() else None
    return PlanContext(
        environ=environ, python=sys.executable, facts=_read_facts(environ, is_dry_run), terminal=terminal
    )


def _read_facts(environ: Mapping[str, str], is_dry_run: bool) -> Callable[[str | None], MachineFacts]:
    """Reads the machine on the first call; a dry run reads files only: no tool, no device, no address of a name."""

    @cache
    def facts(master: str | None) -> MachineFacts:
        from primus.machine.interfaces import parse_ip_address
        from primus.machine.probe import find_machine_root, probe

        is_known = master is not None and not (is_dry_run and parse_ip_address(master) is None)
        tools: Literal["never"] | None = "never" if is_dry_run else None
        return probe(root=find_machine_root(environ), environ=environ, tools=tools, master=master if is_known else None)

    return facts


def _run_with_workers(
    command: compose.Command,
    words: tuple[str, ...],
    job: LaunchJob,
    task: Task,
    options: object,
    for_task: TaskContext,
    context: PlanContext,
) -> int:
    """Plan the workers of `job` and let the task start them; its exit code counts."""
    launch = prepare_launch(job, command.request, words, context)
    if command.options.dry_run:
        return _show_plan(launch.plan, command, f"run folder: {launch.directory}")
    for note in launch.plan.notes:
        if note.startswith("warning: "):
            print(f"primus-cli: {note}", file=sys.stderr)
    from primus.launch import run_node

    with ExitStack() as leaving:  # left together with the other nodes, when all is said
        start = partial(run_node.run_node, launch, for_task.say, leaving)
        here = _add_node_layout(for_task, launch.plan, context)
        return task.run(options, structs.replace(here, launch=start)) or EXIT_OK


def _run_in_this_process(
    command: compose.Command, task: Task, options: object, for_task: TaskContext, context: PlanContext
) -> int:
    request = command.request
    argv = ("primus-cli", "direct", "--", *request.task.split(), *request.words)
    folded = compose.compose_plan(request, LaunchPlan(argv=argv, notes=("done in this process",)), context)
    actions = () if task.SHOWS_PATCHES else folded.actions
    plan = structs.replace(folded, argv=argv, layout=None, actions=actions)
    if command.options.dry_run:
        return _show_plan(plan, command)
    typed = {name: variable for name, variable in plan.env.items() if variable.source.startswith("--env")}
    here = structs.replace(_add_node_layout(for_task, folded, context), variables=typed, shell=dict(for_task.environ))
    os.environ.update({name: variable.value for name, variable in typed.items()})
    if not actions:
        return task.run(options, here) or EXIT_OK
    return _run_with_hooks(command, task, here, context, actions, frozenset(os.environ))


def _add_node_layout(for_task: TaskContext, plan: LaunchPlan, context: PlanContext) -> TaskContext:
    """What a task may know once its node's place among the others is known."""
    shape = plan.layout
    master = shape.master_addr if shape and shape.nnodes > 1 else None
    return structs.replace(for_task, layout=shape, facts=lambda: context.facts(master))


def _run_with_hooks(
    command: compose.Command,
    task: Task,
    for_task: TaskContext,
    context: PlanContext,
    actions: tuple[Action, ...],
    users: frozenset[str],
) -> int:
    """Do the task in this process after its hooks and patches; variables of the user stay, and so do typed options."""
    from primus.launch import run_inline as here

    request = command.request
    words = list(request.words)

    def parse_task_options() -> tuple[Any, tuple[str, ...]]:
        return _parse_task_options(task, request, words)

    def accept(given: HookResult) -> list[str]:
        kept = [
            name
            for name, each in given.env.items()
            if name in users and not extends_list(name, each.value, os.environ[name])
        ]
        os.environ.update({name: each.value for name, each in given.env.items() if name not in kept})
        words[:0] = given.extra
        parse_task_options()
        return [f"{name} stays as the user has set it" for name in kept]

    def run() -> int:
        options, overrides = parse_task_options()
        return task.run(options, structs.replace(for_task, overrides=overrides)) or EXIT_OK

    say = partial(print, file=sys.stderr, flush=True)
    layout = for_task.layout or ClusterLayout(nproc=1)
    return here.run_inline(actions, request, layout, context.python, os.environ, accept, run, say)


def _run_remotely(
    command: compose.Command, words: tuple[str, ...], job: LaunchJob | None, for_task: TaskContext, context: PlanContext
) -> int:
    """Do the task in another place than this process."""
    from primus.launch import run_remote

    planned = run_remote.prepare_remote(job, command.request, words, command.options, context)
    runtime = registry.load_plug_in(RUNTIMES, command.request.runtimes[0].name)
    if command.options.dry_run and runtime.shown:
        print(runtime.shown(planned))
        return EXIT_OK
    if command.options.dry_run:
        return _show_plan(
            planned.plan, command, *([f"run folder: {planned.directory}"] if planned.needs_folder else [])
        )
    return run_remote.run_remote(planned, for_task.say)


def _show_plan(plan: LaunchPlan, command: compose.Command, *more: str) -> int:
    plan = structs.replace(plan, notes=(*plan.notes, *command.notes))
    print(to_json(redact_plan(plan)) if command.options.json else "\n".join([show.format_plan(plan), *more]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

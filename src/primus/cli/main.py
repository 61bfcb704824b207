"""`primus-cli <runtime> [options] [-- <runtime> [options]] -- <task> [options]`: words in, exit code out."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from primus import __version__, redaction, registry
from primus.config import flags
from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError, UsageError, escape_controls, place_of
from primus.interpreter import exclude_working_folder
from primus.launch import chain, hooks, launcher_file, show
from primus.launch.plan import Action, Context, Job, LaunchPlan, lengthens, shown
from primus.launch.prepare import prepare
from primus.launch.request import Request
from primus.launch.signals import exit_code_of
from primus.machine.cluster import Layout
from primus.machine.facts import Facts
from primus.redaction import redact_args
from primus.runs.files import to_json
from primus.runs.store import Outcome, Run
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.launch.actions import Given


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
        return _guarded(words)


def _guarded(words: list[str]) -> int:
    """The exit code; every error is one message, or with `--debug` a traceback."""
    is_debug = "--debug" in words
    try:
        code = _main(words, os.environ)
        sys.stdout.flush()
        return code
    except PrimusError as error:
        if is_debug:
            traceback.print_exc()
            return error.exit_code
        print(f"primus-cli: {escape_controls(_without_secrets(str(error), words))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return EXIT_OK
    except KeyboardInterrupt as error:
        print("primus-cli: interrupted", file=sys.stderr)
        return exit_code_of(error)
    except Exception as error:
        if is_debug:
            traceback.print_exc()
            return EXIT_FAILED
        print(f"primus-cli: {escape_controls(_without_secrets(_unexpected(error), words))}", file=sys.stderr)
        return EXIT_FAILED


def _unexpected(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    what = f"{type(error).__name__}: {error}"
    plug_in = registry.plug_in_of(error)
    if plug_in and plug_in.is_origin:
        return f"the plug-in {plug_in.place} failed: {what}\n  run again with --debug for the whole traceback"
    problem = f"internal error at {place_of(error)}: {what}"
    if plug_in:
        return f"{problem}\n  the plug-in {plug_in.place} called it; run again with --debug for the whole traceback"
    return f"{problem}\n  run again with --debug for the whole traceback, and report it"


def _without_secrets(text: str, words: Sequence[str]) -> str:
    """`text` with each word of the command line that holds a secret masked."""
    for word, shown_word in zip(words, redact_args(words), strict=True):
        text = text.replace(word, shown_word) if word != shown_word else text
    return text


def _main(words: list[str], environ: Mapping[str, str]) -> int:
    unreadable = [word for word in words if not word.isascii() and not _is_unicode(word)]
    if unreadable:
        raise UsageError(f"{unreadable[0]!r} is not UTF-8 text")
    ours, choice = launcher_file.taken(words)
    first = next((word for word in ours if word not in chain.GLOBAL_WORDS), "--help")
    if first in ("-h", "--help", "help"):
        from primus.cli import help_text

        print(help_text.overview())
        return EXIT_OK
    if first == "--version":
        print(f"primus {__version__}")
        return EXIT_OK
    command = chain.parse(ours)
    if command.is_help:
        from primus.cli import help_text

        print(help_text.of(command.request))
        return EXIT_OK
    return _dispatch(launcher_file.applied(command, choice, environ), tuple(words), environ)


def _dispatch(command: chain.Command, words: tuple[str, ...], environ: Mapping[str, str]) -> int:
    request, given = command.request, command.options
    for segment in request.runtimes:
        chain.options_of(segment)
    if not request.task:
        runtime = registry.load("runtimes", request.runtimes[-1].name)
        facts = partial(_facts_of(environ, given.dry_run), None)
        here = TaskContext(environ=environ, json=given.json, dry_run=given.dry_run, facts=facts)
        return runtime.run(chain.options_of(request.runtimes[-1]), here) or EXIT_OK
    task = registry.load("tasks", request.task)
    options, extra = _parse(task, request, request.words)
    context = _context(environ, given.dry_run)
    for_task = TaskContext(
        environ=environ,
        json=given.json,
        dry_run=given.dry_run,
        overrides=extra,
        facts=lambda: context.facts(None),
        patches=getattr(chain.options_of(request.runtimes[-1]), "patch", ()),
    )
    job = task.prepare(options, for_task) if hasattr(task, "prepare") else None
    starts_workers = job is not None
    framework = job.framework if job else None
    find_hooks = cache(lambda: hooks.find(request.task, environ, starts_workers=starts_workers, framework=framework))
    context = structs.replace(context, starts_workers=starts_workers, hooks=find_hooks)
    if registry.load("runtimes", request.runtimes[0].name).LEVEL != "node":
        return _elsewhere(command, words, job, for_task, context)
    if job is None:
        return _in_this_process(command, task, options, for_task, context)
    return _with_workers(command, words, job, task, options, for_task, context)


def _parse(task: ModuleType, request: Request, words: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The options of a task, and the words that change its experiment."""

    def check_extra(extra: list[str]) -> None:
        from primus.cli import misplaced  # only where there are such words

        misplaced.check(extra, task, request)

    takes_overrides = getattr(task, "OVERRIDES", False)
    options, extra = flags.parse(
        task.Options, words, f"task '{request.task}'", extra=takes_overrides, check_extra=check_extra
    )
    return options, tuple(extra)


def _is_unicode(word: str) -> bool:
    try:
        return bool(word.encode())
    except UnicodeEncodeError:
        return False


def _context(environ: Mapping[str, str], is_dry_run: bool) -> Context:
    terminal = os.ttyname(sys.stderr.fileno()) if sys.stderr.isatty() else None
    return Context(environ=environ, python=sys.executable, facts=_facts_of(environ, is_dry_run), terminal=terminal)


def _facts_of(environ: Mapping[str, str], is_dry_run: bool) -> Callable[[str | None], Facts]:
    """Reads the machine on the first call; a dry run reads files only: no tool, no device, no address of a name."""

    @cache
    def facts(master: str | None) -> Facts:
        from primus.machine.interfaces import parsed
        from primus.machine.probe import probe, root_of

        is_known = master is not None and not (is_dry_run and parsed(master) is None)
        tools: Literal["never"] | None = "never" if is_dry_run else None
        return probe(root=root_of(environ), environ=environ, tools=tools, master=master if is_known else None)

    return facts


def _with_workers(
    command: chain.Command,
    words: tuple[str, ...],
    job: Job,
    task: ModuleType,
    options: object,
    for_task: TaskContext,
    context: Context,
) -> int:
    """Start the workers of `job`; a task that has `run` as well does that itself, and its exit code counts."""
    launch = prepare(job, command.request, words, context)
    if command.options.dry_run:
        return _show(launch.plan, command, f"run folder: {launch.directory}")
    for note in launch.plan.notes:
        if note.startswith("warning: "):
            print(f"primus-cli: {note}", file=sys.stderr)
    from primus.launch import local

    with ExitStack() as leaving:  # left together with the other nodes, when all is said
        if hasattr(task, "run"):
            start = partial(local.perform, launch, for_task.say, leaving)
            here = _placed(for_task, launch.plan, context)
            return task.run(options, structs.replace(here, launch=start)) or EXIT_OK
        run, outcome = local.perform(launch, for_task.say, leaving)
        shape = launch.plan.layout
        if shape is None or shape.node_rank == 0 or "SLURM_STEP_ID" not in context.environ:
            _report(outcome, run, command.options)  # the nodes of a step speak to one terminal, and say the same
        return outcome.exit_code or EXIT_OK


def _in_this_process(
    command: chain.Command, task: ModuleType, options: object, for_task: TaskContext, context: Context
) -> int:
    request = command.request
    argv = ("primus-cli", "direct", "--", *request.task.split(), *request.words)
    folded = chain.fold(request, LaunchPlan(argv=argv, notes=("done in this process",)), context)
    actions = () if getattr(task, "SHOWS_PATCHES", False) else folded.actions
    plan = structs.replace(folded, argv=argv, layout=None, actions=actions)
    if command.options.dry_run:
        return _show(plan, command)
    typed = {name: variable for name, variable in plan.env.items() if variable.source.startswith("--env")}
    here = structs.replace(_placed(for_task, folded, context), variables=typed, shell=dict(for_task.environ))
    os.environ.update({name: variable.value for name, variable in typed.items()})
    if not actions:
        return task.run(options, here) or EXIT_OK
    return _with_hooks(command, task, here, context, actions, frozenset(os.environ))


def _placed(for_task: TaskContext, plan: LaunchPlan, context: Context) -> TaskContext:
    """What a task may know once its node's place among the others is known."""
    shape = plan.layout
    master = shape.master_addr if shape and shape.nnodes > 1 else None
    return structs.replace(for_task, layout=shape, facts=lambda: context.facts(master))


def _with_hooks(
    command: chain.Command,
    task: ModuleType,
    for_task: TaskContext,
    context: Context,
    actions: tuple[Action, ...],
    users: frozenset[str],
) -> int:
    """Do the task in this process after its hooks and patches; variables of the user stay, and so do typed options."""
    from primus.launch import here

    request = command.request
    words = list(request.words)

    def parsed() -> tuple[Any, tuple[str, ...]]:
        return _parse(task, request, words)

    def accept(given: Given) -> list[str]:
        kept = [
            name
            for name, each in given.env.items()
            if name in users and not lengthens(name, each.value, os.environ[name])
        ]
        os.environ.update({name: each.value for name, each in given.env.items() if name not in kept})
        words[:0] = given.extra
        parsed()
        return [f"{name} stays as the user has set it" for name in kept]

    def run() -> int:
        options, overrides = parsed()
        return task.run(options, structs.replace(for_task, overrides=overrides)) or EXIT_OK

    say = partial(print, file=sys.stderr, flush=True)
    layout = for_task.layout or Layout(nproc=1)
    return here.perform(actions, request, layout, context.python, os.environ, accept, run, say)


def _elsewhere(
    command: chain.Command, words: tuple[str, ...], job: Job | None, for_task: TaskContext, context: Context
) -> int:
    """Do the task in another place than this process."""
    from primus.launch import remote  # not for what is done here

    planned = remote.prepare(job, command.request, words, command.options, context)
    runtime = registry.load("runtimes", command.request.runtimes[0].name)
    if command.options.dry_run and hasattr(runtime, "shown"):
        print(runtime.shown(planned))
        return EXIT_OK
    if command.options.dry_run:
        return _show(planned.plan, command, *([f"run folder: {planned.directory}"] if planned.needs_folder else []))
    return remote.perform(planned, for_task.say)


def _show(plan: LaunchPlan, command: chain.Command, *more: str) -> int:
    plan = structs.replace(plan, notes=(*plan.notes, *command.notes))
    print(to_json(shown(plan)) if command.options.json else "\n".join([show.text(plan), *more]))
    return EXIT_OK


def _report(outcome: Outcome, run: Run, given: chain.Globals) -> None:
    """Say how the run ended: people read it on standard error, scripts as JSON."""
    if given.json:
        print(to_json({"run": str(run.directory), "outcome": outcome}))
    if outcome.state == "done":
        return
    print(f"primus-cli: run {outcome.state}: {outcome.reason}", file=sys.stderr)
    failure = outcome.first_failure
    if failure is None:
        return
    hint = f"  {failure.hint}\n" if failure.hint else ""
    print(f"{hint}  first: rank {failure.rank} on {failure.host}; log: {run.directory}/{failure.log}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

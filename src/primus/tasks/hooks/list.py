"""List the hooks of tasks in the order in which they run."""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from primus import registry
from primus.config.flags import Positional
from primus.errors import UsageError, did_you_mean
from primus.launch.hooks import discovery
from primus.plan import Action
from primus.report import table
from primus.task import TASKS, TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `hooks list`."""

    task: Positional = ""
    """Task, such as `train` (default: all tasks that have hooks)."""
    subtask: Positional = ""
    """Second word of the task, such as `pretrain`."""
    framework: Positional = ""
    """Backend of the experiment, such as `native` (default: all frameworks that have hooks)."""


class HookListing(Struct, frozen=True):
    """A hook of a task."""

    task: str
    """``train pretrain``; with the framework where it is for one alone."""
    action: Action


def run(options: Options, context: TaskContext) -> None:
    """Print the hooks.

    Raises:
        UsageError: The task or framework does not exist, or a hook cannot be read.
    """
    if options.framework and not registry.has_plug_in("frameworks", options.framework):
        raise UsageError(
            f"no framework '{options.framework}'", did_you_mean(options.framework, registry.list_plug_ins("frameworks"))
        )
    tasks = _select_tasks(f"{options.task} {options.subtask}".strip())
    found = [hook for task in tasks for hook in _list_task_hooks(task, options.framework, context)]
    places = [str(place) for place in discovery.list_hook_folders(context.environ)]
    context.result({"hooks": found, "places": places}, _format_hook_table(found, places))


def _select_tasks(asked: str) -> list[str]:
    tasks = registry.list_plug_ins("tasks")
    matching = [name for name in tasks if not asked or name == asked or name.startswith(f"{asked} ")]
    if not matching:
        raise UsageError(f"no task '{asked}'", did_you_mean(asked, tasks))
    return matching


def _list_task_hooks(task: str, framework: str, context: TaskContext) -> list[HookListing]:
    """The hooks of one task; those of each backend's own come last where none is asked for."""
    starts_workers = registry.load_plug_in(TASKS, task).prepare is not None
    find = partial(discovery.find_hooks, task, context.environ, starts_workers=starts_workers)
    general = find(framework=framework or None)
    others = registry.list_plug_ins("frameworks") if starts_workers and not framework else []
    own = [
        HookListing(f"{task} {name}", each) for name in others for each in find(framework=name) if each not in general
    ]
    return [HookListing(task, each) for each in general] + own


def _format_hook_table(found: list[HookListing], places: list[str]) -> str:
    if not found:
        return f"no hooks in {', '.join(places)}"
    rows = [
        [
            hook.action.stage,
            hook.task,
            hook.action.file,
            ", ".join(hook.action.functions) or hook.action.file.rpartition(".")[2],
            ("once" if hook.action.once else "each node") + (", alone" if hook.action.locked else ""),
            f"{hook.action.timeout_s:g} s",
        ]
        for hook in found
    ]
    return table.format_table(["stage", "task", "file", "kind", "where", "limit"], rows, right=[5])

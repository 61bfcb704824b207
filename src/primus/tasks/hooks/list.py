"""List the hooks that would run around a task, in running order."""

from __future__ import annotations

import sys

from msgspec import Struct

from primus import registry
from primus.config.flags import Positional
from primus.errors import UsageError, did_you_mean
from primus.launch import hooks
from primus.launch.plan import Action
from primus.report import table
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `hooks list`."""

    task: Positional = ""
    """Task, such as `train`; every task that has hooks by default."""
    subtask: Positional = ""
    """Its second word, such as `pretrain`."""


class Hook(Struct, frozen=True):
    """A hook of a task."""

    task: str
    action: Action


def run(options: Options, context: TaskContext) -> None:
    """Print the hooks.

    Raises:
        UsageError: There is no such task, or a hook cannot be read.
    """
    found: list[Hook] = []
    ignored: dict[str, None] = {}
    for task in _tasks(f"{options.task} {options.subtask}".strip()):
        starts_workers = hasattr(registry.load("tasks", task), "prepare")
        found += [Hook(task, each) for each in hooks.find(task, context.environ, starts_workers=starts_workers)]
        scripts = hooks.unnumbered(task, context.environ, starts_workers=starts_workers)
        ignored |= {str(script): None for script in scripts}
    places = [str(place) for place in hooks.places(context.environ)]
    for script in ignored:
        print(f"{script}: is no hook, since its name does not begin with a number", file=sys.stderr)
    context.result({"hooks": found, "places": places}, _text(found, places))


def _tasks(asked: str) -> list[str]:
    tasks = registry.names("tasks")
    matching = [name for name in tasks if not asked or name == asked or name.startswith(f"{asked} ")]
    if not matching:
        raise UsageError(f"no task '{asked}'", did_you_mean(asked, tasks))
    return matching


def _text(found: list[Hook], places: list[str]) -> str:
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
    return table.table(["stage", "task", "file", "kind", "where", "limit"], rows, right=[5])

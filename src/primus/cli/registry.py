"""`register_subcommand` of AMD-AGI/Primus: a function of arguments and words becomes a task."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from primus.errors import UsageError
from primus.task import TaskContext

Subcommand = Callable[[Namespace, list[str]], int | None]
"""A function `run(args, unknown_args)`: `args.command` is the name of the task, `unknown_args` the words after it."""
TaskFunction = Callable[[Struct, TaskContext], int | None]


class SubcommandOptions(Struct, frozen=True, kw_only=True):
    """Options of a registered subcommand: it has none, and parses its words."""


def register_subcommand(name: str) -> Callable[[Subcommand], TaskFunction]:
    """Decorator that makes the module of a function a plug-in of the kind `tasks`.

    The file is `tasks/NAME.py` in a folder of `$PRIMUS_PLUGINS`, or `primus/cli/subcommands/NAME.py` in a checkout.

    Raises:
        UsageError: The name of the file is not the name of the task.
    """

    def register(function: Subcommand) -> TaskFunction:
        def run(options: Struct, context: TaskContext) -> int | None:
            return function(Namespace(command=name, json=context.json), list(context.overrides))

        file = Path(function.__code__.co_filename)
        if file.stem.replace("_", "-") != name.replace("_", "-"):
            raise UsageError(f"{file}: register_subcommand({name!r}): the file has another name", f"name it {name}.py")
        module = vars(sys.modules[function.__module__])
        module |= {"Options": SubcommandOptions, "PASSES_WORDS": True, "run": run}
        return run

    return register

"""What a task plug-in gives, and what it is given.

A task file holds a docstring (its first line is the help), `class Options(msgspec.Struct)` whose fields are its flags,
and either

    def run(options: Options, context: TaskContext) -> int | None     done in this process, on the control plane
    def prepare(options: Options, context: TaskContext) -> Job        what worker processes are started for, and
    def work(attempt: Attempt) -> None                                what each of them does

A task may have both: `prepare` then gives None where no workers are needed, and `run` does the task, starting the
workers of the job with `context.launch()` where there is one.

`OVERRIDES = True` says that words which are no flags change the experiment; they come in `context.overrides`.
`SHOWS_PATCHES = True` says that files of `--patch` are to be shown, in `context.patches`, and not to be run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from primus.machine.cluster import ClusterLayout
from primus.machine.facts import MachineFacts
from primus.runs.files import to_json
from primus.runs.store import Run, RunOutcome

if TYPE_CHECKING:
    from primus.machine.environment import Assignment


class TaskContext(Struct, frozen=True, kw_only=True):
    """What a task may know of the command it serves."""

    environ: Mapping[str, str]
    json: bool = False
    """Whether results are wanted as JSON."""
    dry_run: bool = False
    """Whether nothing may be touched; `run` is never called then."""
    overrides: tuple[str, ...] = ()
    """Words that change the experiment."""
    facts: Callable[[], MachineFacts] = MachineFacts
    """What this machine is; read on the first call."""
    layout: ClusterLayout | None = None
    """Where this node stands among the nodes of the launch; known in `run`."""
    variables: Mapping[str, Assignment] = {}
    """Variables of `direct --env`; known in `run`."""
    shell: Mapping[str, str] | None = None
    """The environment without those; None where it is `environ`."""
    patches: tuple[str, ...] = ()
    """Files of `direct --patch`."""
    launch: Callable[[], tuple[Run, RunOutcome]] | None = None
    """Starts the workers of the job that `prepare` gave, and waits for their end; known in `run`."""

    def say(self, text: str) -> None:
        """Print for people, on standard error where standard output carries JSON."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def result(self, value: Any, text: str) -> None:
        """Print a result: `value` as JSON where that is wanted, else `text`."""
        print(to_json(value) if self.json else text, flush=True)

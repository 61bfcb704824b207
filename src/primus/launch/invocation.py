"""One call of `primus-cli` as a value, as its executors (run_inline, run_node, run_remote) read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, structs

from primus.launch.command import Command
from primus.machine.cluster import ClusterLayout
from primus.plan import LaunchJob, LaunchRequest, PlanContext
from primus.task import Task, TaskContext


class Invocation(Struct, frozen=True, kw_only=True):
    """A parsed command line with its task and the facts of the machine that it was typed on."""

    command: Command
    """The command, including defaults of the launcher files."""
    words: tuple[str, ...]
    """The command line as typed."""
    task: Task
    options: Any
    """Options of the task."""
    parse_task_words: Callable[[Sequence[str]], tuple[Any, tuple[str, ...]]]
    """Parses the words of the task into options and overrides; hooks may add words."""
    job: LaunchJob | None
    """The job that the task describes; None if it needs no worker processes."""
    task_context: TaskContext
    plan_context: PlanContext

    @property
    def request(self) -> LaunchRequest:
        return self.command.request

    def make_task_context(self, layout: ClusterLayout | None) -> TaskContext:
        """The context of the task on a node of `layout`: the facts then include the route to the master."""
        master = layout.master_of_several if layout else None
        return structs.replace(self.task_context, layout=layout, facts=lambda: self.plan_context.facts(master))

"""Watch runs while they train: loss, speed, health and last lines, as a page or, without a terminal, line by line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError, UsageError
from primus.runs import store
from primus.runs.store import Run
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.run_report.watch import RunView, WatchedRun


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs watch`."""

    runs: Annotated[list[str], Meta(extra={"positional": True, "names": "run"})] = []
    """Runs: folder, id or its beginning, or name of an experiment (its newest run); by default those that execute now,
    or else the newest one."""
    interval: Annotated[float, Meta(gt=0)] = 2.0
    """Seconds between two looks."""
    once: bool = False
    """Print the runs as they are now."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def run(options: Options, context: TaskContext) -> int:
    """Watch until all runs have ended; gives the exit code of the first one that did not end well.

    Raises:
        UsageError: A run does not exist.
    """
    from primus.run_report.watch import WatchedRun, format_view

    watched = [WatchedRun(found) for found in _find_runs(options)]
    if context.json or options.once:
        views = _look(watched)
        context.result(views, "\n\n".join("\n".join(format_view(view, _find_width())) for view in views))
        return EXIT_OK
    try:
        views = _show_page(watched, options) if sys.stdout.isatty() else _print_changes(watched, options)
    except KeyboardInterrupt:
        context.say("the runs go on" if len(watched) > 1 else "the run goes on")
        return EXIT_OK
    return next((view.exit_code or EXIT_FAILED for view in views if view.state != "done"), EXIT_OK)


def _find_runs(options: Options) -> list[Run]:
    workspace = Path(options.workspace)
    if options.runs:
        return [store.find_run(name, workspace) for name in options.runs]
    found = [each for each in store.list_workspace_runs(workspace) if not store.is_damaged_run(each.directory)]
    if not found:
        raise UsageError(f"no runs in {options.workspace}", "name a run folder, or set --workspace")
    return [each for each in found if each.is_active()] or [max(found, key=lambda each: each.id)]


def _look(watched: Sequence[WatchedRun]) -> list[RunView]:
    from primus.run_report.watch import describe_missing

    views = []
    for each in watched:
        try:
            views.append(each.look())
        except PrimusError as error:
            views.append(describe_missing(each.run, error))
    return views


def _follow(watched: Sequence[WatchedRun], interval_s: float) -> Iterator[list[RunView]]:
    """Looks at the runs until all have ended."""
    while True:
        views = _look(watched)
        yield views
        if all(view.has_ended for view in views):
            return
        time.sleep(interval_s)


def _print_changes(watched: Sequence[WatchedRun], options: Options) -> list[RunView]:
    from primus.run_report.watch import format_change

    before: list[RunView | None] = [None] * len(watched)
    views: list[RunView] = []
    for views in _follow(watched, options.interval):
        for old, new in zip(before, views, strict=True):
            for line in format_change(old, new):
                print(line, flush=True)
        before = [*views]
    return views


def _show_page(watched: Sequence[WatchedRun], options: Options) -> list[RunView]:
    """Draw the page in place; it stays on the terminal as it was last."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from primus.run_report.watch import format_time_of_day, format_view

    console = Console(highlight=False)
    views: list[RunView] = []
    # The cursor comes back, and the page stays whole, whatever ends the block.
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for views in _follow(watched, options.interval):
            lines = []
            for view in views:
                head, *rest = format_view(view, console.width)
                style = "bold" if view.state in ("done", "planned", "running") else "bold red"
                lines += [Text(head, style, no_wrap=True), *(Text(line, no_wrap=True) for line in rest), Text("")]
            hint = "" if all(view.has_ended for view in views) else f"{format_time_of_day(time.time())}  Ctrl-C leaves"
            live.update(Text("\n").join([*lines, Text(hint, "dim")]), refresh=True)
    return views


def _find_width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return 120

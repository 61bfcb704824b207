"""Analyze traces of profilers: where the time goes, operators, ranks, memory; and compare two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `analyze trace`."""

    what: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """A run (folder, run id or experiment), or files and folders of Chrome traces, one file for each rank."""
    against: str | None = None
    """A run, file or folder to compare with: show the changes relative to it."""
    operators: Annotated[int, Meta(ge=0)] = 20
    """Number of operators to list."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def run(options: Options, context: TaskContext) -> None:
    """Print the analysis.

    Raises:
        UsageError: No trace is found, or a file is not one.
    """
    # numpy: not for the commands that only list this task.
    from primus.traces.find_files import find_traces
    from primus.traces.format import format_difference, format_report
    from primus.traces.report import analyze_traces, compare_reports

    if not options.what:
        raise UsageError("analyze trace takes a run, or files of traces", "record one with train --profile steps=5:8")
    workspace = Path(options.workspace)
    files = find_traces(options.what, workspace)
    if options.against is None:
        report = analyze_traces(files, options.operators)
        context.result(report, format_report(report))
        return
    # All operators: one that is rare in this trace may be frequent in the other.
    report = analyze_traces(files, 1 << 30)
    reference = analyze_traces(find_traces([options.against], workspace), 1 << 30)
    found = compare_reports(reference, report, options.operators)
    context.result(found, format_difference(found, options.against, " ".join(options.what)))

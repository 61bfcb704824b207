"""Report on a run: what it did, where its time went, what limits it, and what to change; as text, page and JSON."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.config.flags import PositionalRun
from primus.errors import PrimusError
from primus.runs import store
from primus.runs.files import to_json, write_text
from primus.task import TaskContext

FOLDER = "report"
"""Folder of the files in the run folder."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `report`."""

    run: PositionalRun
    """Run folder, run id or its beginning, or name of an experiment (its newest run)."""
    html: str | None = None
    """File for the page (default: report/report.html in the run folder)."""
    md: str | None = None
    """File for the text (default: report/report.md in the run folder)."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def run(options: Options, context: TaskContext) -> None:
    """Write and print the report.

    Raises:
        UsageError: The run does not exist.
        PrimusError: A file that was asked for cannot be written.
    """
    # numpy: not for the commands that only list this task.
    from primus.run_report.html_page import format_html
    from primus.run_report.markdown import format_markdown, format_text
    from primus.run_report.report import build_report

    found = store.find_run(options.run, Path(options.workspace))
    report = build_report(found, context.environ)
    folder = found.directory / FOLDER
    files = {
        Path(options.html or folder / "report.html"): format_html(report),
        Path(options.md or folder / "report.md"): format_markdown(report),
        folder / "report.json": to_json(report) + "\n",
    }
    for path, content in files.items():
        try:
            write_text(path, content)
        except PrimusError as error:
            if folder not in path.parents:
                raise
            # The folder of another user: the report is printed nevertheless.
            context.say(f"{error.problem}; --html FILE writes the page elsewhere")
    context.result(report, f"{format_text(report)}\n\npage: {next(iter(files))}")

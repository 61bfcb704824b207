"""Plot the losses, speeds and other numbers of runs over their steps, as a page or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.runs import store
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs plot`."""

    runs: Annotated[list[str], Meta(extra={"positional": True, "names": "run"})] = []
    """Runs: folder, id or its beginning, or name of an experiment (its newest run)."""
    html: str | None = None
    """File for the page, with a table and one chart for each metric; in light and dark."""
    png: str | None = None
    """File for the charts as a picture, which a browser on this machine draws."""
    metrics: list[str] = []
    """Numbers of `step` events, such as loss, tokens_per_s or memory_gib (default: loss tokens_per_s grad_norm)."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def run(options: Options, context: TaskContext) -> None:
    """Write the charts.

    Raises:
        UsageError: A run does not exist or has no steps, or no run has a metric.
        UnfitError: A picture is asked for, and no browser is installed.
    """
    from primus.run_report.plot import read_plotted_run, write_page, write_picture

    if not options.runs:
        raise UsageError("no run is named", "runs plot RUN... --html FILE")
    if not options.html and not options.png:
        raise UsageError("neither --html nor --png is given", "runs plot RUN... --html runs.html")
    runs = [read_plotted_run(store.find_run(name, Path(options.workspace))) for name in options.runs]
    files = []
    if options.html:
        files.append(write_page(runs, options.metrics, Path(options.html)))
    if options.png:
        files.append(write_picture(runs, options.metrics, Path(options.png)))
    context.result({"files": [str(file) for file in files]}, "\n".join(f"written: {file}" for file in files))

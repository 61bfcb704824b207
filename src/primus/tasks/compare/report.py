"""Report on a comparison: speeds with intervals, the fairness of each pair, and ratios of fair pairs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.comparison.report.comparison_report import ReportOptions

SHIPPED = "shipped"


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare report`."""

    results: Annotated[tuple[str, ...], Meta(extra={"positional": True})]
    """Folders of `compare run`, archives of `compare wrap`, or files of results."""
    html: bool = False
    """Write report.html: all tables and pictures in one file."""
    png: bool = False
    """Write each picture as PNG, and compare.png with all of them; needs a Chromium on PATH."""
    md: bool = False
    """Write report.md."""
    csv: bool = False
    """Write cells.csv, a row for each cell."""
    output: str | None = None
    """Folder of the files; `report` in the first folder of results when omitted."""
    allow_unfair: bool = False
    """Also give a ratio for pairs that are not fair, with the reason next to it."""
    published: str | None = None
    """Published results to draw next to the measured ones: a YAML table, or `shipped` for the one that comes with
    primus."""
    prices: str | None = None
    """YAML file with the price of an hour of each device, its source and date."""
    target_loss: float | None = None
    """Loss to which the training time is compared."""


def run(options: Options, context: TaskContext) -> None:
    """Print the report, and write the files that were asked for.

    Raises:
        UsageError: There are no results, or a table is wrong.
        PrimusError: A file cannot be read or written.
        UnfitError: PNG files need a browser, and none is installed.
    """
    # Not for the commands that only list this task.
    from primus.comparison.folder.archive import load_results
    from primus.comparison.report.cell_results import group_cells
    from primus.comparison.report.comparison_report import build_comparison_report
    from primus.comparison.report.files import FORMATS, write_report_files
    from primus.comparison.report.tables import format_report_text

    loaded = load_results([Path(each) for each in options.results])
    cells = group_cells(loaded)
    report = build_comparison_report(cells, loaded.skipped, _read_options(options))
    formats = [name for name in FORMATS if getattr(options, name)]
    written = write_report_files(report, cells, _choose_folder(options), formats)
    text = format_report_text(report)
    context.result(report, "\n\n".join([text, *(["files:\n" + "\n".join(map(str, written))] if written else [])]))


def _read_options(options: Options) -> ReportOptions:
    from primus.comparison.report.comparison_report import ReportOptions
    from primus.comparison.report.published_results import read_published_results
    from primus.comparison.speed.efficiency import read_prices

    if options.target_loss is not None and not options.target_loss > 0:
        raise UsageError(f"--target-loss {options.target_loss:g}: not positive", "such as --target-loss 3.3")
    published = options.published
    return ReportOptions(
        allow_unfair=options.allow_unfair,
        prices=read_prices(Path(options.prices)) if options.prices else [],
        target_loss=options.target_loss,
        published=[] if not published else read_published_results(*([] if published == SHIPPED else [Path(published)])),
    )


def _choose_folder(options: Options) -> Path:
    from primus.comparison.folder.comparison_folder import REPORT

    if options.output:
        return Path(options.output)
    folders = [Path(each) for each in options.results if Path(each).is_dir()]
    return (folders[0] if folders else Path(options.results[0]).parent) / REPORT

"""The files of a report on a comparison: a page, tables and pictures."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from primus.comparison.folder.archive import load_results
from primus.comparison.folder.comparison_folder import REPORT, ComparisonFolder
from primus.comparison.report.cell_results import group_cells
from primus.comparison.report.comparison_report import ComparisonReport, ReportOptions, build_comparison_report
from primus.comparison.report.page import Cells, draw_comparison_pictures, format_comparison_page
from primus.comparison.report.tables import format_report_csv, format_report_markdown
from primus.report.page import Html
from primus.report.picture_files import write_pictures
from primus.runs.files import to_json, write_text

FORMATS = ("html", "md", "csv", "png")
OVERVIEW = "compare"
"""Name of the file with all pictures, which tprimat's evaluate/compare.py writes."""


def write_report_files(report: ComparisonReport, cells: Cells, folder: Path, formats: Collection[str]) -> list[Path]:
    """Write the report in the given formats, and as JSON if it is written at all; gives the files.

    Raises:
        UnfitError: PNG files need a browser, and none is installed.
        PrimusError: A file cannot be written.
    """
    texts = {
        "report.html": format_comparison_page(report, cells) if "html" in formats else None,
        "report.md": format_report_markdown(report) if "md" in formats else None,
        "cells.csv": format_report_csv(report) if "csv" in formats else None,
        "report.json": to_json(report) + "\n" if {"html", "md", "csv"} & set(formats) else None,
    }
    written = [folder / name for name, text in texts.items() if text is not None]
    for path in written:
        write_text(path, texts[path.name] or "")
    if "png" in formats:
        pictures = dict(draw_comparison_pictures(report, cells))
        overview = {OVERVIEW: Html("\n".join(pictures.values()))} if pictures else {}
        written += write_pictures(pictures | overview, folder)
    return written


def write_final_report(folder: ComparisonFolder) -> list[Path]:
    """Write the page and the pictures of all results of a comparison, with a link where tprimat has its picture.

    Raises:
        UnfitError: Pictures need a browser, and none is installed; the page is written.
        PrimusError: A file cannot be written.
    """
    loaded = load_results([folder.path])
    cells = group_cells(loaded)
    report = build_comparison_report(cells, loaded.skipped, ReportOptions())
    place = folder.path / REPORT
    written = write_report_files(report, cells, place, ["html"])
    written += write_report_files(report, cells, place, ["png"])
    if folder.picture_link.is_symlink() or not folder.picture_link.exists():
        folder.picture_link.unlink(missing_ok=True)
        folder.picture_link.symlink_to(f"{folder.path.name}/{REPORT}/{OVERVIEW}.png")
        written.append(folder.picture_link)
    return written

"""The report of a run as Markdown, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from primus.report import table
from primus.report.markdown import format_markdown_table
from primus.run_report.report import NO_CHANGES, RunReport, RunTable, list_change_rows, list_key_figures, list_tables


def format_markdown(report: RunReport) -> str:
    """The whole report, without pictures."""
    item = report.facts.summary
    parts = [f"# Run {item.id} ({item.name})", f"**What limits it:** {report.limit}"]
    parts += [f"Note: {note}" for note in report.facts.notes]
    for each in _list_all_tables(report):
        parts += [f"## {each.title}"] if each.title else []
        parts += [format_markdown_table(each.header, each.rows, each.right)] if each.rows else []
        parts += [each.text] if each.text else []
    return "\n\n".join(parts) + "\n"


def format_text(report: RunReport) -> str:
    """The same for a terminal."""
    item = report.facts.summary
    parts = [f"Run {item.id} ({item.name})", f"What limits it: {report.limit}"]
    parts += [f"Note: {note}" for note in report.facts.notes]
    for each in _list_all_tables(report):
        lines = [each.title] if each.title else []
        lines += [table.format_table(each.header, each.rows, each.right)] if each.rows else []
        parts.append("\n".join([*lines, each.text] if each.text else lines))
    return "\n\n".join(parts)


def _list_all_tables(report: RunReport) -> Iterator[RunTable]:
    yield RunTable(title="", header=["", ""], rows=list_key_figures(report))
    changes = list_change_rows(report)
    header = ["change", "reason", "gain", "basis"]
    yield RunTable(title="Changes", header=header, rows=changes, text="" if changes else NO_CHANGES)
    yield from list_tables(report)

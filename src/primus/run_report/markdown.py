"""The report of a run as Markdown, which is readable in a terminal, too."""

from __future__ import annotations

from primus.report.markdown import format_markdown_table
from primus.run_report.report import NO_CHANGES, RunReport, list_change_rows, list_key_figures, list_tables


def format_markdown(report: RunReport) -> str:
    """The whole report, without pictures."""
    item = report.facts.summary
    parts = [f"# Run {item.id} ({item.name})", f"**What limits it:** {report.limit}"]
    parts += [f"Note: {note}" for note in report.facts.notes]
    parts.append(format_markdown_table(["", ""], list_key_figures(report)))
    parts.append("## Changes")
    changes = list_change_rows(report)
    header = ["change", "reason", "gain", "basis"]
    parts.append(format_markdown_table(header, changes) if changes else NO_CHANGES)
    for each in list_tables(report):
        parts += [f"## {each.title}", format_markdown_table(each.header, each.rows, each.right)]
        parts += [each.text] if each.text else []
    return "\n\n".join(parts) + "\n"

"""The report of a run as Markdown, which is readable in a terminal, too."""

from __future__ import annotations

from collections.abc import Sequence

from primus.run_report.report import RunReport, list_change_rows, list_key_figures, list_tables


def format_markdown(report: RunReport) -> str:
    """The whole report, without pictures."""
    item = report.facts.summary
    parts = [f"# Run {item.id} ({item.name})", f"**What limits it:** {report.limit}"]
    parts += [f"Note: {note}" for note in report.facts.notes]
    parts.append(_format_rows(["", ""], list_key_figures(report)))
    parts.append("## Changes")
    changes = list_change_rows(report)
    parts.append(_format_rows(["change", "reason", "gain", "basis"], changes) if changes else "No rule finds one.")
    for each in list_tables(report):
        parts += [f"## {each.title}", _format_rows(each.header, each.rows, each.right)]
        parts += [each.text] if each.text else []
    return "\n\n".join(parts) + "\n"


def _format_rows(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    cells = [[_escape_cell(cell) for cell in row] for row in rows]
    widths = [max(3, len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(header)]

    def format_row(row: Sequence[str]) -> str:
        aligned = (f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return f"| {' | '.join(aligned)} |"

    rule = [f"{'-' * (w - 1)}{':' if i in right else '-'}" for i, w in enumerate(widths)]
    return "\n".join([format_row(header), format_row(rule), *map(format_row, cells)])


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

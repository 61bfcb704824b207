"""Tables as Markdown, which are readable in a terminal, too."""

from __future__ import annotations

from collections.abc import Sequence


def format_markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows under a header, columns aligned; the columns in `right` are flush right."""
    cells = [[_escape_cell(cell) for cell in row] for row in rows]
    widths = [max(3, len(title), *(len(row[i]) for row in cells)) for i, title in enumerate(header)]

    def format_row(row: Sequence[str]) -> str:
        aligned = (f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return f"| {' | '.join(aligned)} |"

    rule = [f"{'-' * (w - 1)}{':' if i in right else '-'}" for i, w in enumerate(widths)]
    return "\n".join([format_row(header), format_row(rule), *map(format_row, cells)])


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

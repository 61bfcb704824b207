"""Human-readable tables and numbers."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import zip_longest

from primus.errors import escape_controls

LEAST_WRAPPED = 24
"""Width below which a column goes to a line of its own rather than being wrapped beside the others."""
LEAST_SHRUNK = 16
"""Width to which columns of text are made narrower, so that a row needs no further lines for its last columns."""


def format_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    *,
    indent: int = 0,
    spare: Sequence[int] = (),
) -> str:
    """Rows under a header, columns aligned; the columns in `right` are flush right.

    A row is one line. On a terminal that is narrower than that, columns of `spare` are left out, in its order; then
    columns of text are wrapped, or the last columns go to further lines.
    """
    lines = [line for row in format_rows(header, rows, right, indent, spare) for line in row.split("\n")]
    return "\n".join(" " * indent + line for line in lines)


def format_rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    indent: int = 0,
    spare: Sequence[int] = (),
) -> list[str]:
    """The header and each row of `format_table`, without the indent."""
    shown = [header, *([escape_controls(cell).replace("\n", "\\n") for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    kept = list(range(len(header)))
    lines = [kept]
    if sys.stdout.isatty():
        limit = shutil.get_terminal_size().columns - indent
        for column in spare:
            if _measure_line(widths, kept) > limit:
                kept.remove(column)
        lines = (
            [kept] if _shrink_columns(widths, kept, right, shown, limit) else _fit_columns(widths, kept, right, limit)
        )
    return [
        "\n".join(text for at, columns in enumerate(lines) for text in _format_line(row, columns, widths, right, at))
        for row in shown
    ]


def _measure_line(widths: Sequence[int], columns: Sequence[int]) -> int:
    return sum(widths[column] + 2 for column in columns) - 2


def _shrink_columns(
    widths: list[int], columns: Sequence[int], right: Sequence[int], rows: Sequence[Sequence[str]], limit: int
) -> bool:
    """Make the widest columns of text narrower until a row fits; whether that is possible without breaking words."""
    least = {
        column: max(
            min(widths[column], LEAST_SHRUNK),
            *(min(len(word), LEAST_WRAPPED) for row in rows for word in row[column].split() or [""]),
        )
        for column in columns
        if column not in right
    }
    over = _measure_line(widths, columns) - limit
    if over > sum(widths[column] - width for column, width in least.items()):
        return False
    for _ in range(over):
        widest = max((column for column in least if widths[column] > least[column]), key=lambda column: widths[column])
        widths[widest] -= 1
    return True


def _fit_columns(widths: list[int], columns: Sequence[int], right: Sequence[int], limit: int) -> list[list[int]]:
    """The columns of each line of a row; makes columns that are wrapped narrower in `widths`."""
    lines: list[list[int]] = [[]]
    used = 0
    for column in columns:
        width, room = widths[column], limit - used
        is_wrapped = column == columns[-1] and column not in right and room >= LEAST_WRAPPED
        if lines[-1] and width > room and not is_wrapped:
            lines.append([])
            used, room = len(CONTINUED), limit - len(CONTINUED)
        widths[column] = min(width, max(room, 1))
        lines[-1].append(column)
        used += widths[column] + 2
    return lines


CONTINUED = " " * 4
"""Indent of the further lines of a row."""


def _format_line(
    row: Sequence[str], columns: Sequence[int], widths: Sequence[int], right: Sequence[int], at: int
) -> list[str]:
    """One line of a row, or several if a cell is wrapped; none for further columns that are empty."""
    cells = [_wrap_cell(row[column], widths[column]) for column in columns]
    texts = []
    for parts in zip_longest(*cells, fillvalue=""):
        aligned = [
            f"{part:>{widths[column]}}" if column in right else f"{part:<{widths[column]}}"
            for column, part in zip(columns, parts, strict=True)
        ]
        texts.append((CONTINUED * bool(at) + "  ".join(aligned)).rstrip())
    return [text for text in texts if text or not at]


def _wrap_cell(text: str, width: int) -> list[str]:
    """The lines of a cell; a word that is longer than a line, such as an address, begins one."""
    if len(text) <= width:
        return [text]
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return [line[start : start + width] for line in lines for start in range(0, len(line), width)]


def format_number(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits, ``-`` for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


UNITS = {
    "tflops": "TFLOP/s", "gflop": "GFLOP", "tokens_per_s": "tokens/s", "gb_per_s": "GB/s", "mb_per_s": "MB/s",
    "iops": "IOPS", "bytes": "B", "kib": "KiB", "mib": "MiB", "gib": "GiB", "us": "\u00b5s", "ms": "ms", "s": "s",
}  # fmt: skip
"""Units as people write them, by the last words of names of values."""


def format_value_name(name: str) -> str:
    """The name of a value as a heading: ``busbw_gb_per_s`` is ``busbw GB/s``."""
    words = name.split("_")
    for count in range(min(3, len(words)), 0, -1):
        unit = UNITS.get("_".join(words[-count:]))
        # A single letter is a name by itself, such as the sequence length s.
        if unit and (count < len(words) or len(name) > 1):
            return " ".join([*words[:-count], unit])
    return " ".join(words)


def format_unit(unit: str) -> str:
    """A unit of results as people write it: ``us`` is the microsecond."""
    return UNITS.get(unit, unit)


def format_duration(seconds: float | None) -> str:
    """``42 s``, ``3:05`` minutes or ``2:03:05`` hours."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_size(count: int) -> str:
    """Bytes in binary units: ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_time(seconds: float | None) -> str:
    """Local time to the second, ``-`` for none."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

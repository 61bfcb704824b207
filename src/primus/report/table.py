"""Human-readable tables and numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from primus.errors import escape_controls


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows under a header, a line each, columns aligned; the columns in `right` are flush right."""
    shown = [header, *([escape_controls(cell).replace("\n", "\\n") for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    lines = []
    for row in shown:
        cells = [
            f"{cell:>{w}}" if i in right else f"{cell:<{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


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

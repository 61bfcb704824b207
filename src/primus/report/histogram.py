"""Histograms for the terminal and as a chart."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from msgspec import Struct

from primus.report import table
from primus.report.charts import (
    LETTER_WIDTH,
    ChartSize,
    Drawing,
    draw_fill_sample,
    draw_in_sizes,
    draw_legend,
    draw_rect,
    draw_text,
    shift_down,
)
from primus.report.page import Html

BLOCKS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
"""Eighths of a character cell."""

COLUMNS = 40
"""Characters of the longest bar."""

HIGHEST_BAR, LABEL_ROWS, EDGE, GAP = 260.0, 52.0, 24.0, 6.0
"""In the chart: the highest bar, the labels above and below it, the sides, and the space between two ranges."""
WIDE_PITCH = 62.0
"""Width of a range from which the shares stand above its bars: two of them with their space."""

MANY_DIGITS = 100_000
"""Larger numbers are shown in units of 1,024 under a bar of the chart."""


class HistogramBar(Struct, frozen=True, kw_only=True):
    """Count and weight of a range of integers."""

    first: int
    """Smallest number."""
    last: int
    """Largest number."""
    count: int
    """Number of items."""
    weight: int
    """Their sum, such as the tokens of these documents."""


def format_text_histogram(bars: Sequence[HistogramBar], things: str, unit: str) -> str:
    """One bar per range, with its share of the count and of the sum.

    Args:
        bars: The ranges, in order.
        things: Name of the counted items, such as ``documents``.
        unit: Name of the summed unit, such as ``tokens``.
    """
    highest, _, weight = _compute_totals(bars)
    rows = [
        (
            f"{bar.first:,} - {bar.last:,}" if bar.last > bar.first else f"{bar.first:,}",
            f"{bar.count:,}",
            f"{bar.weight / weight:.1%}",
            format_block_bar(bar.count / highest),
        )
        for bar in bars
    ]
    return table.format_table((unit, things, f"of all {unit}", ""), rows, right=(0, 1, 2))


def format_block_bar(share: float) -> str:
    """A bar of block characters in proportion to `COLUMNS`; a share above 0 is always visible."""
    eighths = max(round(8 * COLUMNS * share), 1 if share > 0 else 0)
    whole, rest = divmod(eighths, 8)
    return BLOCKS[8] * whole + (BLOCKS[rest] if rest else "")


def draw_histogram(bars: Sequence[HistogramBar], title: str, things: str, unit: str) -> Html:
    """A chart with two bars per range, for the count and the sum."""
    shares = [f"share of {things}", f"share of {unit}"]

    def draw(size: ChartSize) -> Drawing:
        parts = list(_draw_columns(size, bars, things, unit))
        legend, height = draw_legend(size, shares, draw_fill_sample)
        top = HIGHEST_BAR + LABEL_ROWS
        note = textwrap.wrap(f"each bar: {things} with at least this many {unit}, up to the next bar", 46)
        lines = [" ".join(note)] if not size.is_narrow else note
        below = [draw_text(size.width / 2, 18.0 * row, line, "soft middle") for row, line in enumerate(lines, 1)]
        parts += [*shift_down(legend, top), *shift_down(below, top + height)]
        return parts, top + height + 18 * len(lines) + 4

    return draw_in_sizes(draw, title)


def _draw_columns(size: ChartSize, bars: Sequence[HistogramBar], things: str, unit: str) -> Iterator[Html]:
    _, total, weight = _compute_totals(bars)
    highest = max((max(bar.count / total, bar.weight / weight) for bar in bars), default=1.0)
    room, base = size.width - 2 * EDGE, LABEL_ROWS / 2 + HIGHEST_BAR
    pitch = room / max(1, len(bars))
    width = min((pitch - GAP) / 2, 34.0)
    yield draw_rect(EDGE, base, room, 1, "shade", "")
    # Each label has its width; on a narrow screen not every bar has one.
    labels = [_format_short_number(bar.first) for bar in bars]
    widest = LETTER_WIDTH * max((len(label) + 1 for label in labels), default=1)
    every = max(1, math.ceil(widest / pitch))
    for number, bar in enumerate(bars):
        middle = EDGE + (number + 0.5) * pitch
        for side, share in enumerate((bar.count / total, bar.weight / weight)):
            tall = HIGHEST_BAR * share / highest
            tip = f"{bar.first:,} to {bar.last:,}: {bar.count:,} {things}, {bar.weight:,} {unit}"
            yield draw_rect(middle + (side - 1) * width, base - tall, width, tall, f"fill c{side}", tip)
            if share >= 0.001 and pitch >= WIDE_PITCH:
                place = middle + (side - 0.5) * width
                yield draw_text(place, base - tall - 5, f"{share:.0%}" if share >= 0.01 else "<1%", "soft middle")
        if number % every == 0:
            # The first label must not begin before the picture.
            style = "soft" if middle < widest / 2 else "soft middle"
            yield draw_text(EDGE / 2 if style == "soft" else middle, base + 18, labels[number], style)


def _compute_totals(bars: Sequence[HistogramBar]) -> tuple[int, int, int]:
    """The highest count, the sum of counts and the sum of weights, each at least 1."""
    return (
        max(1, max((bar.count for bar in bars), default=0)),
        max(1, sum(bar.count for bar in bars)),
        max(1, sum(bar.weight for bar in bars)),
    )


def _format_short_number(number: int) -> str:
    """A number that fits under its bar."""
    if number < MANY_DIGITS:
        return f"{number:,}"
    return f"{number >> 10:,} Ki" if number < MANY_DIGITS << 10 else f"{number >> 20:,} Mi"

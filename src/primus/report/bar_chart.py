"""A chart of horizontal bars, each with its label, its number, and a mark where its limit is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from primus.report.charts import LETTER_WIDTH, ChartSize, Drawing, draw_in_sizes, draw_rect, draw_text, shorten
from primus.report.page import Html

ROW_HEIGHT, LABEL_WIDTH, VALUE_WIDTH = 24.0, 330.0, 170.0
NARROW_ROW_HEIGHT, EDGE = 44.0, 8.0
"""On narrow screens label and number stand above the bar."""
LABEL_LETTERS = 38
"""Letters of a label that fit next to the bars."""


class ChartBar(NamedTuple):
    """One bar."""

    label: str
    value: float
    text: str
    """The number, as it is shown."""
    tip: str = ""
    interval: tuple[float, float] | None = None
    """Drawn as a thin bar over the value."""
    limit: float | None = None
    """Drawn as a mark across the bar."""
    color: int = 0


def draw_bar_chart(title: str, bars: Sequence[ChartBar]) -> Html:
    """The bars, from top to bottom."""
    ends = [max(bar.interval[1] if bar.interval else bar.value, bar.limit or 0.0) for bar in bars]
    highest = max([*ends, 1e-12])

    def draw(size: ChartSize) -> Drawing:
        left, height = (EDGE, NARROW_ROW_HEIGHT) if size.is_narrow else (LABEL_WIDTH, ROW_HEIGHT)
        scale = (size.width - left - (EDGE if size.is_narrow else VALUE_WIDTH)) / highest
        parts = []
        for number, (bar, end) in enumerate(zip(bars, ends, strict=True)):
            top = number * height
            if size.is_narrow:  # on a line of their own
                letters = int((size.width - 2 * EDGE) / LETTER_WIDTH) - len(bar.text)
                parts += [draw_text(left, top + 15, shorten(bar.label, letters), "")]
                parts += [draw_text(size.width - EDGE, top + 15, bar.text, "end")]
                top += NARROW_ROW_HEIGHT - ROW_HEIGHT
            else:
                parts += [draw_text(left - 8, top + 15, shorten(bar.label, LABEL_LETTERS), "end")]
                parts += [draw_text(left + scale * end + 8, top + 15, bar.text, "")]
            parts.append(draw_rect(left, top + 3, scale * bar.value, ROW_HEIGHT - 8, f"fill c{bar.color}", bar.tip))
            if bar.interval:
                low, high = (scale * each for each in bar.interval)
                parts.append(draw_rect(left + low, top + 10, max(high - low, 1.0), 2, "fill c1", ""))
            if bar.limit:
                parts.append(draw_rect(left + scale * bar.limit - 1, top + 1, 2, ROW_HEIGHT - 4, "fill c6", ""))
        return parts, len(bars) * height

    return draw_in_sizes(draw, title)

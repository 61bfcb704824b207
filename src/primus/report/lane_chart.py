"""A chart of what runs when: one lane for each resource, with bars over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from primus.report.charts import (
    BOTTOM,
    LETTER_WIDTH,
    NUM_COLORS,
    ChartSize,
    Drawing,
    draw_axis,
    draw_fill_sample,
    draw_in_sizes,
    draw_legend,
    draw_rect,
    draw_text,
    shift_down,
    shorten,
)
from primus.report.page import Html

LANE, BAR = 30.0, 20.0
LABEL_ROW = 18.0
"""On narrow screens the name of a lane stands above it."""


class LaneBar(NamedTuple):
    """What a lane does from `start` to `end`."""

    start: float
    end: float
    kind: int
    """Number of its color, and of its name."""
    tip: str = ""


def draw_lane_chart(
    title: str, kinds: Sequence[str], lanes: Sequence[tuple[str, Sequence[LaneBar]]], last: float, axis: str
) -> Html:
    """Lanes one below the other, over an axis from 0 to `last`.

    Args:
        title: Above the chart.
        kinds: What the colors of bars stand for.
        lanes: Name and bars of each.
        last: End of the axis.
        axis: What the chart is over, such as `s`.
    """

    def draw(size: ChartSize) -> Drawing:
        scale = (size.width - size.left - size.right) / (last or 1.0)
        row = LANE + (LABEL_ROW if size.is_narrow else 0)
        parts = []
        for number, (name, bars) in enumerate(lanes):
            top = number * row + (LABEL_ROW if size.is_narrow else 0)
            if size.is_narrow:
                parts.append(draw_text(size.left, top - 4, name, ""))
            else:
                letters = int((size.left - 8) / LETTER_WIDTH)
                parts.append(draw_text(size.left - 8, top + 15, shorten(name, letters), "end"))
            for bar in bars:
                width = max(scale * (bar.end - bar.start), 0.5)
                style = f"fill c{bar.kind % NUM_COLORS}"
                parts.append(draw_rect(size.left + scale * bar.start, top, width, BAR, style, bar.tip))
        bottom = len(lanes) * row
        parts += draw_axis(size, 0.0, last, axis, bottom - LANE + BAR)
        legend, height = draw_legend(size, kinds, draw_fill_sample)
        return [*parts, *shift_down(legend, bottom + BOTTOM)], bottom + BOTTOM + height

    return draw_in_sizes(draw, title)

"""The prediction of how an experiment scales, as text and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from primus.prediction.scaling import RESTART_S, ScalingPoint
from primus.report.charts import draw_line_chart
from primus.report.page import format_page, join_fragments, make_paragraph, make_table
from primus.report.table import format_duration, format_table

HEADER = (
    "nodes", "GPUs", "batch", "s/step", "tokens/s", "tokens/s/GPU", "efficiency", "communication", "bubble", "GiB",
    "failures/day", "save every", "useful",
)  # fmt: skip


def format_scaling(title: str, points: Sequence[ScalingPoint], assumptions: Sequence[str]) -> str:
    """The table, with what it rests on."""
    rows = [_list_cells(point) for point in points]
    table = format_table(HEADER, rows, right=range(len(HEADER)))
    return "\n\n".join([title, table, "\n".join(_list_remarks(points, assumptions))])


def _list_cells(point: ScalingPoint) -> tuple[str, ...]:
    misfit = " (does not fit)" if point.fits is False else ""
    return (
        f"{point.nodes:,}",
        f"{point.devices:,}",
        f"{point.global_batch:,}",
        f"{point.seconds:.3g}",
        f"{point.tokens_per_s:,.0f}",
        f"{point.tokens_per_s_per_device:,.0f}",
        f"{point.efficiency:.0%}",
        f"{point.communication:.1%}",
        f"{point.bubble:.1%}",
        f"{point.memory_gib:,.0f}{misfit}",
        f"{point.failures_per_day:.2g}",
        f"{format_duration(point.checkpoint_interval_s)} ({point.checkpoint_interval_steps:,} steps)",
        f"{point.useful:.1%}",
    )


def _list_remarks(points: Sequence[ScalingPoint], assumptions: Sequence[str]) -> list[str]:
    last = points[-1]
    rate = last.failures_per_day / last.devices
    shortest, longest = min(point.save_s for point in points), max(point.save_s for point in points)
    failures = (
        f"failures: {rate:.2g} for each GPU and day; saves take {shortest:.2g} to {longest:.2g} s;"
        f" restarts {RESTART_S:.0f} s (assumed)"
    )
    return [
        f"layout: {points[0].layout}",
        failures,
        "efficiency: speed of a GPU over that of the first row; useful: without saves, lost work and restarts",
        *(f"assumed: {text}" for text in assumptions),
    ]


def format_scaling_page(title: str, points: Sequence[ScalingPoint], assumptions: Sequence[str]) -> str:
    """The page: speed, where the time goes, and the table."""
    places = [math.log2(point.nodes) for point in points]
    axis = "nodes, as a power of 2"
    pairs = list(zip(places, points, strict=True))
    speed = draw_line_chart(
        "Speed of one GPU", [("tokens/s/GPU", [(x, point.tokens_per_s_per_device) for x, point in pairs])], "", axis
    )
    shares = draw_line_chart(
        "Where the time goes",
        [
            ("waiting for collectives", [(x, 100 * point.communication) for x, point in pairs]),
            ("bubble", [(x, 100 * point.bubble) for x, point in pairs]),
            ("saves, lost work and restarts", [(x, 100 * (1 - point.useful)) for x, point in pairs]),
        ],
        "%",
        axis,
    )
    table = make_table(HEADER, [_list_cells(point) for point in points], right=range(len(HEADER)))
    remarks = join_fragments(*(make_paragraph(text) for text in _list_remarks(points, assumptions)))
    return format_page(title, [("", speed), ("", shares), ("Numbers", table), ("What it rests on", remarks)])

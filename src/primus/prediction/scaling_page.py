"""The prediction of how an experiment scales, as text and as a page."""

from __future__ import annotations

from collections.abc import Sequence

from primus.prediction.scaling import RESTART_S, ScalingPoint
from primus.report.bar_chart import ChartBar, draw_bar_chart
from primus.report.charts import draw_share_bar
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


def _list_shares(point: ScalingPoint) -> list[tuple[str, float]]:
    """What a day is spent on."""
    waiting = {"waiting for collectives": point.communication, "bubble": point.bubble}
    computing = 1 - sum(waiting.values())
    parts = {"computing": computing, **waiting}
    return [
        *((name, share * point.useful) for name, share in parts.items()),
        ("saves, lost work, restarts", 1 - point.useful),
    ]


def format_scaling_page(title: str, points: Sequence[ScalingPoint], assumptions: Sequence[str]) -> str:
    """The page: speed, where the time goes, and the table."""
    speed = draw_bar_chart(
        "Speed of one GPU, tokens/s",
        [
            ChartBar(f"{point.nodes:,} nodes", point.tokens_per_s_per_device, f"{point.tokens_per_s_per_device:,.0f}")
            for point in points
        ],
    )
    shares = join_fragments(*(draw_share_bar(f"{point.nodes:,} nodes", _list_shares(point)) for point in points))
    table = make_table(HEADER, [_list_cells(point) for point in points], right=range(len(HEADER)))
    remarks = join_fragments(*(make_paragraph(text) for text in _list_remarks(points, assumptions)))
    sections = [("", speed), ("Where the time goes", shares), ("Numbers", table), ("What it rests on", remarks)]
    return format_page(title, sections)

"""The picture of a comparison of engines: losses by step, and their differences from the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from primus.comparison.engines.parity import EngineSteps, ParityTolerance
from primus.report.charts import (
    BOTTOM,
    NUM_COLORS,
    TOP,
    ChartSize,
    Drawing,
    draw_in_sizes,
    draw_legend,
    draw_line_sample,
    draw_path,
    draw_text,
    shift_down,
    split_curve,
)
from primus.report.page import Html, make_element

HEIGHT, GAP = 190.0, 62.0
"""The size of each panel, and the gap between two of them."""
SMALLEST = 1e-8
"""Differences below this are drawn at it: losses are float32."""


def draw_parity(reference: EngineSteps, others: Sequence[EngineSteps], tolerance: ParityTolerance) -> Html:
    """The losses of all engines, and below them the differences from the reference."""
    everyone = [reference, *others]
    losses = [_list_differences(reference.losses, each.losses) for each in others]
    norms = [_list_differences(reference.grad_norms, each.grad_norms, relative=True) for each in others]

    def draw(size: ChartSize) -> Drawing:
        parts = [
            *_draw_losses(size, everyone),
            *_draw_panel(size, 1, "absolute difference of the loss", losses, others, tolerance.loss),
            *_draw_panel(size, 2, "relative difference of the gradient norm", norms, others, tolerance.grad_norm),
        ]
        bottom = TOP + 3 * HEIGHT + 2 * GAP + BOTTOM
        legend, height = draw_legend(size, [steps.engine for steps in everyone], draw_line_sample)
        return [*parts, *shift_down(legend, bottom)], bottom + height

    return draw_in_sizes(draw, f"Loss of each step, and differences from {reference.engine}")


def _draw_losses(size: ChartSize, everyone: Sequence[EngineSteps]) -> Iterator[Html]:
    values = [loss for steps in everyone for loss in steps.losses if loss is not None] or [0.0, 1.0]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    num_steps = max(len(steps.losses) for steps in everyone)
    bottom = TOP + HEIGHT
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * HEIGHT
        yield _draw_line(size, y, "grid")
        # More digits do not fit beside the axis of a narrow picture.
        digits = 4 if span > 1e-3 * abs(high) else 6 if size.is_narrow else 8
        yield draw_text(size.left - 8, y + 4, f"{low + share * span:.{digits}g}", "soft end")
    yield draw_text(size.left, TOP - 10, "loss", "soft")
    for index, steps in enumerate(everyone):
        points = [
            (_place_step(size, step, num_steps), None if loss is None else bottom - (loss - low) / span * HEIGHT)
            for step, loss in enumerate(steps.losses)
        ]
        yield from _draw_engine(points, index, steps.engine)


def _list_differences(
    reference: Sequence[float | None], other: Sequence[float | None], *, relative: bool = False
) -> list[float | None]:
    """The difference at each common step; None where one of them is not a number."""
    return [
        None if ours is None or theirs is None else abs(ours - theirs) / ((abs(ours) or 1.0) if relative else 1.0)
        for ours, theirs in zip(reference, other, strict=False)
    ]


def _draw_panel(
    size: ChartSize,
    number: int,
    title: str,
    rows: Sequence[Sequence[float | None]],
    others: Sequence[EngineSteps],
    tolerance: float,
) -> Iterator[Html]:
    """Differences on a logarithmic scale, with the tolerance as a line."""
    values = [value for row in rows for value in row if value] + [tolerance]
    low, high = math.log10(SMALLEST), math.ceil(math.log10(max(values)))
    top = TOP + number * (HEIGHT + GAP)
    bottom, num_steps = top + HEIGHT, max([1, *map(len, rows)])

    def place_value(value: float) -> float:
        share = (math.log10(max(value, SMALLEST)) - low) / (high - low)
        return bottom - share * HEIGHT

    yield draw_text(size.left, top - 10, title, "soft")
    for exponent in range(int(low), int(high) + 1, 2):
        y = place_value(10.0**exponent)
        yield _draw_line(size, y, "grid")
        yield draw_text(size.left - 8, y + 4, f"{'< ' * (exponent == int(low))}1e{exponent}", "soft end")
    yield _draw_line(size, place_value(tolerance), "limit")
    yield draw_text(size.width - size.right, place_value(tolerance) + 15, f"tolerance {tolerance:g}", "soft end")
    for index, (each, row) in enumerate(zip(others, rows, strict=True), 1):
        points = [
            (_place_step(size, step, num_steps), None if value is None else place_value(value))
            for step, value in enumerate(row)
        ]
        yield from _draw_engine(points, index, each.engine)
    for step in {0, num_steps // 2, num_steps - 1}:
        # The last one ends at the border, which would cut it.
        anchor = "end" if step and step == num_steps - 1 else "middle"
        yield draw_text(_place_step(size, step, num_steps), bottom + 20, f"step {step + 1}", f"soft {anchor}")


def _place_step(size: ChartSize, step: int, num_steps: int) -> float:
    return size.left + (size.width - size.left - size.right) * step / max(1, num_steps - 1)


def _draw_engine(points: Sequence[tuple[float, float | None]], index: int, name: str) -> Iterator[Html]:
    """The line of an engine, with a gap where a value is None; a value between two gaps is a dot."""
    for run in split_curve(points):
        yield draw_path(run, f"line c{index % NUM_COLORS}", name)


def _draw_line(size: ChartSize, y: float, style: str) -> Html:
    return make_element("path", "", d=f"M{size.left:g} {y:.1f} H{size.width - size.right:g}", class_=style)

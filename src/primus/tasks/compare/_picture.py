"""The picture of a comparison of engines: losses by step, and their differences from the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from primus.report.charts import draw_rect, draw_text
from primus.report.page import Html, make_element
from primus.tasks.compare._parity import EngineSteps, ParityTolerance

WIDTH, LEFT, RIGHT = 880.0, 76.0, 24.0
LOSS_TOP, LOSS_HEIGHT = 92.0, 190.0
GAP_TOP, NORM_TOP, GAP_HEIGHT = 336.0, 588.0, 190.0
HEIGHT = 832.0
SMALLEST = 1e-8
"""Differences below this are drawn at it: losses are float32."""
SHORT_LINE = 10.0
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 5")
"""Patterns of the lines, which lie on each other where engines agree."""


def draw_parity_svg(reference: EngineSteps, others: Sequence[EngineSteps], tolerance: ParityTolerance) -> Html:
    """SVG picture; usable alone or inside a page."""
    everyone = [reference, *others]
    parts = [
        make_element("style", Html(STYLE)),
        draw_rect(0, 0, WIDTH, HEIGHT, "ground", ""),
        *_draw_legend(everyone, reference.engine),
        *_draw_losses(everyone),
        *_draw_differences(reference, others, tolerance),
    ]
    return make_element(
        "svg",
        Html("\n".join(["", *parts, ""])),
        xmlns="http://www.w3.org/2000/svg",
        class_="parity",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        width=f"{WIDTH:g}",
        height=f"{HEIGHT:g}",
        role="img",
    )


def _draw_legend(everyone: Sequence[EngineSteps], reference: str) -> Iterator[Html]:
    yield draw_text(LEFT, 30, "Loss of each step, and differences from " + reference, "title")
    for index, steps in enumerate(everyone):
        x = LEFT + 150 * index
        yield _draw_path([(x, 56), (x + 30, 56)], index)
        yield draw_text(x + 37, 60, steps.engine, "")


def _draw_losses(everyone: Sequence[EngineSteps]) -> Iterator[Html]:
    values = [loss for steps in everyone for loss in steps.losses if loss is not None] or [0.0, 1.0]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    num_steps = max(len(steps.losses) for steps in everyone)
    bottom = LOSS_TOP + LOSS_HEIGHT
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * LOSS_HEIGHT
        yield _draw_line(y, "grid")
        digits = 4 if span > 1e-3 * abs(high) else 8
        yield draw_text(LEFT - 8, y + 4, f"{low + share * span:.{digits}g}", "soft end")
    yield draw_text(LEFT, LOSS_TOP - 10, "loss", "soft")
    for index, steps in enumerate(everyone):
        points = [
            None if loss is None else (_place_step(step, num_steps), bottom - (loss - low) / span * LOSS_HEIGHT)
            for step, loss in enumerate(steps.losses)
        ]
        yield _draw_path(points, index, steps.engine)


def _draw_differences(
    reference: EngineSteps, others: Sequence[EngineSteps], tolerance: ParityTolerance
) -> Iterator[Html]:
    """The differences of losses, and below them the relative ones of gradient norms."""
    losses = [_list_differences(reference.losses, each.losses) for each in others]
    norms = [_list_differences(reference.grad_norms, each.grad_norms, relative=True) for each in others]
    yield from _draw_panel(GAP_TOP, "absolute difference of the loss", losses, others, tolerance.loss)
    title = "relative difference of the gradient norm"
    yield from _draw_panel(NORM_TOP, title, norms, others, tolerance.grad_norm)


def _list_differences(
    reference: Sequence[float | None], other: Sequence[float | None], *, relative: bool = False
) -> list[float | None]:
    """The difference at each common step; None where one of them is not a number."""
    return [
        None if ours is None or theirs is None else abs(ours - theirs) / ((abs(ours) or 1.0) if relative else 1.0)
        for ours, theirs in zip(reference, other, strict=False)
    ]


def _draw_panel(
    top: float, title: str, rows: Sequence[Sequence[float | None]], others: Sequence[EngineSteps], tolerance: float
) -> Iterator[Html]:
    """Differences on a logarithmic scale, with the tolerance as a line."""
    values = [value for row in rows for value in row if value] + [tolerance]
    low, high = math.log10(SMALLEST), math.ceil(math.log10(max(values)))
    bottom, num_steps = top + GAP_HEIGHT, max([1, *map(len, rows)])

    def place_value(value: float) -> float:
        share = (math.log10(max(value, SMALLEST)) - low) / (high - low)
        return bottom - share * GAP_HEIGHT

    yield draw_text(LEFT, top - 10, title, "soft")
    for exponent in range(int(low), int(high) + 1, 2):
        y = place_value(10.0**exponent)
        yield _draw_line(y, "grid")
        yield draw_text(LEFT - 8, y + 4, f"{'< ' * (exponent == int(low))}1e{exponent}", "soft end")
    yield _draw_line(place_value(tolerance), "limit")
    yield draw_text(WIDTH - RIGHT, place_value(tolerance) - 5, f"tolerance {tolerance:g}", "limit-text end")
    for index, (each, row) in enumerate(zip(others, rows, strict=True), 1):
        points = [
            None if value is None else (_place_step(step, num_steps), place_value(value))
            for step, value in enumerate(row)
        ]
        yield _draw_path(points, index, each.engine)
    for step in {0, num_steps // 2, num_steps - 1}:
        # The last one ends at the border, which would cut it.
        anchor = "end" if step and step == num_steps - 1 else "middle"
        yield draw_text(_place_step(step, num_steps), bottom + 20, f"step {step + 1}", f"soft {anchor}")


def _place_step(step: int, num_steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, num_steps - 1)


def _draw_path(points: Sequence[tuple[float, float] | None], index: int, name: str = "") -> Html:
    """The line of an engine, with a gap where a value is None; a value between two gaps is a short line."""
    parts = []
    for before, point, after in zip([None, *points], points, [*points[1:], None], strict=False):
        if point is not None:
            parts.append(f"{'M' if before is None else 'L'}{point[0]:.1f} {point[1]:.1f}")
        if point is not None and before is None and after is None:
            parts.append(f"h{SHORT_LINE:g}")
    steps = " ".join(parts)
    if not parts:
        return Html("")
    title = make_element("title", name) if name else Html("")
    dash = {"stroke-dasharray": DASHES[index % len(DASHES)]}
    return make_element("path", title, d=steps, class_=f"engine engine-{index % len(DASHES)}", **dash)


def _draw_line(y: float, style: str) -> Html:
    return make_element("path", "", d=f"M{LEFT:g} {y:.1f} H{WIDTH - RIGHT:g}", class_=style)


STYLE = """
.parity { --ground: #fff; --ink: #1d1f24; --soft: #5d636f; --grid: #e2e3e7; --limit: #b3261e; --e0: #1d1f24;
  --e1: #0b62c4; --e2: #c2571a; --e3: #2f7d32; --e4: #8436a8;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .parity { --ground: #1c1f25; --ink: #e6e7ea; --soft: #a9afbb; --grid: #353a44;
  --limit: #ff8a80; --e0: #e6e7ea; --e1: #6cb2ff; --e2: #f0a060; --e3: #7fcf83; --e4: #c7a6ee; } }
.parity .ground { fill: var(--ground); }
.parity text { font-size: 12px; fill: var(--ink); } .parity .title { font-size: 17px; font-weight: 650; }
.parity .soft { fill: var(--soft); } .parity .end { text-anchor: end; } .parity .middle { text-anchor: middle; }
.parity path { fill: none; } .parity .grid { stroke: var(--grid); }
.parity .limit { stroke: var(--limit); stroke-dasharray: 6 4; } .parity .limit-text { fill: var(--limit); }
.parity .engine { stroke-width: 1.9; stroke-linejoin: round; }
.parity .engine-0 { stroke: var(--e0); } .parity .engine-1 { stroke: var(--e1); }
.parity .engine-2 { stroke: var(--e2); } .parity .engine-3 { stroke: var(--e3); }
.parity .engine-4 { stroke: var(--e4); }
"""

"""Charts as SVG, in light and dark: lines over steps, shares of a whole, layers over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from primus.report.page import Html, make_element

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 880.0, 84.0, 24.0, 52.0, 44.0
HEIGHT = 210.0
"""Height of the area in which curves are drawn."""
LEGEND_ROW = 18.0
MOST_POINTS = 600
"""A longer curve is drawn by the smallest and the largest value of each part, which keeps spikes visible."""
NUM_COLORS = 8
NUM_TICKS = 5
"""Wanted on an axis; round numbers give three to six."""
MOST_DIGITS = 8
"""Behind the point of a label; more do not fit next to the axis."""
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 5", "4 2", "1 4", "9 3 2 3 2 3")
"""Of the lines, by color: they must be told apart without colors."""
Points = Sequence[tuple[float, float | None]]


def draw_line_chart(
    title: str,
    curves: Sequence[tuple[str, Points]],
    unit: str,
    axis: str,
    *,
    shade: tuple[float, float, str] | None = None,
) -> Html:
    """Curves over one axis, each with its own color and dashes; a value that is None interrupts its curve.

    Args:
        title: Above the chart.
        curves: Name and points of each.
        unit: Of the values.
        axis: What the chart is over, such as `step`, or the unit of it.
        shade: First and last place of a shaded part, and what it is.
    """
    values = [y for _, points in curves for _, y in points if y is not None and math.isfinite(y)]
    places = [x for _, points in curves for x, _ in points]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    first, last = (min(places), max(places)) if places else (0.0, 1.0)
    span = (last - first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / span * (WIDTH - LEFT - RIGHT)
        return LEFT + across, TOP + HEIGHT - (y - low) / (high - low) * HEIGHT

    parts = [*_draw_scale(low, high, unit), *_draw_axis(first, last, axis)]
    if shade is not None:
        left, right = (place(min(max(edge, first), last), low)[0] for edge in shade[:2])
        parts.append(draw_rect(left, TOP, right - left, HEIGHT, "shade", shade[2]))
        parts.append(draw_text(left + 4, TOP + 14, shade[2], "soft"))
    for index, (name, points) in enumerate(curves):
        style = f"line c{index % NUM_COLORS}"
        runs = _split_curve(_thin_out(points))
        parts += [draw_path([place(x, y) for x, y in run], style, name) for run in runs]
    legend, height = draw_line_legend([name for name, _ in curves])
    moved = make_element("g", Html("\n".join(parts)), transform=f"translate(0 {height:g})")
    return wrap_chart([draw_title(title), *legend, moved], TOP + height + HEIGHT + BOTTOM)


def draw_title(title: str) -> Html:
    """The title at the top of a chart."""
    return make_element("text", title, x=f"{LEFT:g}", y="20", class_="title")


def draw_line_legend(names: Sequence[str]) -> tuple[list[Html], float]:
    """A piece of each line with its name, and the height of the rows beyond the first."""
    if len(names) < 2:
        return [], 0.0
    parts, x, y = [], LEFT, 36.0
    for index, name in enumerate(names):
        width = 48 + 7 * len(name)
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + LEGEND_ROW
        parts += [
            draw_path([(x, y), (x + 26, y)], f"line c{index % NUM_COLORS}", ""),
            draw_text(x + 32, y + 4, name, ""),
        ]
        x += width
    return parts, y - 36.0


def draw_share_bar(title: str, parts: Sequence[tuple[str, float]]) -> Html:
    """One bar, divided in proportion, with a legend of shares."""
    total = sum(value for _, value in parts) or 1.0
    drawn = [make_element("text", title, x=f"{LEFT:g}", y="24", class_="title")]
    x, width = LEFT, WIDTH - LEFT - RIGHT
    for index, (name, value) in enumerate(parts):
        length = width * value / total
        drawn.append(draw_rect(x, 40, length, 34, f"fill c{index % NUM_COLORS}", f"{name}: {value / total:.1%}"))
        x += length
    for index, (name, value) in enumerate(parts):
        column, row = index % 2, index // 2
        left, y = LEFT + column * 390, 100 + row * 22
        drawn.append(draw_rect(left, y - 10, 12, 12, f"fill c{index % NUM_COLORS}", ""))
        drawn.append(draw_text(left + 20, y, f"{name}  {value / total:.1%}", ""))
    return wrap_chart(drawn, 100 + 22 * math.ceil(len(parts) / 2))


def draw_area_chart(
    title: str, names: Sequence[str], samples: Sequence[tuple[float, Sequence[float]]], unit: str
) -> Html:
    """Layers over time that add up; each sample has a value for each name, and holds until the next."""
    high = max((sum(values) for _, values in samples), default=1.0) or 1.0
    last = max((time for time, _ in samples), default=1.0) or 1.0
    parts = [*_draw_frame(title, names), *_draw_scale(0.0, high, unit), *_draw_axis(0.0, last, "ms")]
    below = [0.0] * len(samples)
    for index, name in enumerate(names):
        above = [base + values[index] for base, (_, values) in zip(below, samples, strict=True)]
        edge = [_place_area(time, value, last, high) for (time, _), value in zip(samples, above, strict=True)]
        back = [_place_area(time, value, last, high) for (time, _), value in zip(samples, below, strict=True)]
        parts.append(draw_path([*edge, *reversed(back)], f"fill c{index % NUM_COLORS}", name, is_closed=True))
        below = above
    return wrap_chart(parts, TOP + HEIGHT + BOTTOM)


def _place_area(x: float, y: float, last: float, high: float) -> tuple[float, float]:
    return LEFT + x / last * (WIDTH - LEFT - RIGHT), TOP + HEIGHT - y / high * HEIGHT


def _draw_frame(title: str, names: Sequence[str]) -> Iterator[Html]:
    yield make_element("text", title, x=f"{LEFT:g}", y="20", class_="title")
    if len(names) < 2:
        return
    x = LEFT
    for index, name in enumerate(names):
        yield draw_rect(x, 30, 12, 12, f"fill c{index % NUM_COLORS}", "")
        yield draw_text(x + 18, 40, name, "")
        x += 36 + 7 * len(name)


def _draw_scale(low: float, high: float, unit: str) -> Iterator[Html]:
    for value, label in list_ticks(low, high):
        y = TOP + HEIGHT * (1 - (value - low) / (high - low))
        yield make_element("path", "", d=f"M{LEFT:g} {y:.1f} H{WIDTH - RIGHT:g}", class_="grid")
        yield draw_text(LEFT - 8, y + 4, label, "soft end")
    yield draw_text(LEFT - 8, TOP - 12, unit, "soft end")


def _draw_axis(first: float, last: float, axis: str) -> Iterator[Html]:
    last = last if last > first else first + 1.0
    for value, label in list_ticks(first, last, whole=axis == "step"):
        share = (value - first) / (last - first)
        kind = "soft" if share < 0.04 else "soft end" if share > 0.96 else "soft middle"
        text = f"{axis} {label}" if axis == "step" else f"{label} {axis}"
        yield draw_text(LEFT + share * (WIDTH - LEFT - RIGHT), TOP + HEIGHT + 22, text, kind)


def list_ticks(low: float, high: float, *, whole: bool = False) -> list[tuple[float, str]]:
    """The multiples of 1, 2 or 5 times a power of ten from `low` to `high`, about five, and their labels.

    Args:
        low: First value of the axis.
        high: Its last value, above `low`.
        whole: Whether the axis counts something.
    """
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= 0.999 * rough)
    step = max(step, 1.0) if whole else step
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    # Sums of steps are not exact: a tick at an end of the axis must not be lost.
    numbers = range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)
    form = f",.{digits}f" if digits <= MOST_DIGITS else ".3g"
    return [(number * step, format(number * step, form)) for number in numbers]


def _thin_out(points: Points) -> Points:
    """At most about `MOST_POINTS` points: the extremes of each part."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        part = [(x, y) for x, y in points[start : start + size] if y is not None]
        if not part:
            kept.append(points[start])
            continue
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def _split_curve(points: Points) -> Iterator[list[tuple[float, float]]]:
    """The uninterrupted parts of a curve."""
    run: list[tuple[float, float]] = []
    for x, y in points:
        if y is not None and math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def draw_path(points: Sequence[tuple[float, float]], style: str, name: str, *, is_closed: bool = False) -> Html:
    """A line through points, or an area; one point is a dot."""
    steps = " ".join(f"{'M' if place == 0 else 'L'}{x:.1f} {y:.1f}" for place, (x, y) in enumerate(points))
    if len(points) == 1:
        steps, style = f"{steps} h0.1", f"{style} dot"
    return make_element("path", make_element("title", name), d=steps + (" Z" if is_closed else ""), class_=style)


def draw_rect(x: float, y: float, width: float, height: float, style: str, label: str) -> Html:
    """A rectangle, with a tip if it has a label."""
    title = make_element("title", label) if label else Html("")
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    return make_element("rect", title, class_=style, **place)


def draw_text(x: float, y: float, text: str, style: str) -> Html:
    """Text at its base line."""
    return make_element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=style)


def wrap_chart(parts: Sequence[Html], height: float) -> Html:
    """The picture of parts that use the styles of charts."""
    ground = draw_rect(0, 0, WIDTH, height, "ground", "")
    return make_element(
        "svg",
        Html("\n".join(["", make_element("style", Html(STYLE)), ground, *parts, ""])),
        xmlns="http://www.w3.org/2000/svg",
        class_="chart",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        width=f"{WIDTH:g}",
        height=f"{height:g}",
        role="img",
    )


STYLE = """
.chart { --ground: #fff; --ink: #1d1f24; --soft: #5d636f; --grid: #e2e3e7; --c0: #0b62c4; --c1: #c2571a; --c2: #2f7d32;
  --c3: #8436a8; --c4: #8a6d00; --c5: #00798c; --c6: #b3261e; --c7: #7a7f8a; margin: 0.75rem 0;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .chart { --ground: #1c1f25; --ink: #e6e7ea; --soft: #a9afbb; --grid: #353a44;
  --c0: #6cb2ff; --c1: #f0a060; --c2: #7fcf83; --c3: #c7a6ee; --c4: #e0c35a; --c5: #5cc8d8; --c6: #ff8a80;
  --c7: #9aa0ac; } }
.chart .ground { fill: var(--ground); } .chart text { font-size: 12px; fill: var(--ink); }
.chart .title { font-size: 15px; font-weight: 650; } .chart .soft { fill: var(--soft); }
.chart .end { text-anchor: end; } .chart .middle { text-anchor: middle; }
.chart path { fill: none; } .chart .grid { stroke: var(--grid); }
.chart .line { stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.chart .dot { stroke-width: 7; } .chart .shade { fill: var(--soft); fill-opacity: 0.18; }
.chart .limit { stroke: var(--c6); stroke-width: 1.6; stroke-dasharray: 6 3; }
.chart .mark { stroke-width: 1.6; } .chart .mark.hollow { fill: var(--ground); }
.chart .bound { stroke: var(--ink); stroke-width: 1.4; }
""" + "".join(
    f".chart .line.c{i} {{ stroke: var(--c{i}); stroke-dasharray: {dashes or 'none'}; }}"
    f" .chart .fill.c{i} {{ fill: var(--c{i}); }} .chart .mark.c{i} {{ stroke: var(--c{i}); fill: var(--c{i}); }}\n"
    for i, dashes in enumerate(DASHES)
)

"""Charts as SVG, in light and dark: lines over steps, shares of a whole, layers over time.

Each chart is drawn twice, for wide and for narrow screens, of which a page shows one: a picture that is only made
smaller has labels that nobody can read.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from primus.report.page import Html, join_fragments, make_element

NARROW_SCREEN_PX = 800
"""On narrower screens the narrow drawings are shown. At this width the labels of the wide ones have 11 pixels."""
TOP, BOTTOM = 24.0, 34.0
"""Above and below the area in which curves are drawn."""
HEIGHT = 210.0
"""Of that area."""
TITLE_ROW, LEGEND_ROW = 19.0, 19.0
LETTER_WIDTH, TITLE_LETTER_WIDTH = 7.0, 8.4
"""Mean width of a letter of a label, and of a title."""
MOST_POINTS = 600
"""A longer curve is drawn by the smallest and the largest value of each part, which keeps spikes visible."""
NUM_COLORS = 8
MOST_DIGITS = 8
"""Behind the point of a label; more do not fit next to the axis."""
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 5", "4 2", "1 4", "9 3 2 3 2 3")
"""Of the lines, by color: they must be told apart without colors."""
Points = Sequence[tuple[float, float | None]]


class ChartSize(NamedTuple):
    """Size of a drawing, in pixels of the screen for which it is made."""

    name: str
    width: float
    left: float
    """Space for the labels of the vertical axis."""
    right: float
    num_ticks: int
    """Wanted on the horizontal axis."""

    @property
    def is_narrow(self) -> bool:
        return self is NARROW


WIDE = ChartSize("wide", 880.0, 84.0, 24.0, 5)
NARROW = ChartSize("narrow", 352.0, 64.0, 12.0, 3)
Drawing = tuple[list[Html], float]
"""The parts of a chart, and their height."""


def draw_in_sizes(draw: Callable[[ChartSize], Drawing], title: str) -> Html:
    """The chart that `draw` makes, for wide and for narrow screens, below its title."""
    return join_fragments(*(_wrap_chart(size, title, *draw(size)) for size in (WIDE, NARROW)))


def select_wide(chart: Html) -> Html:
    """The wide drawing of a chart, as a picture of its own."""
    return Html(chart[: chart.index("</svg>") + len("</svg>")])


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

    def draw(size: ChartSize) -> Drawing:
        def place(x: float, y: float) -> tuple[float, float]:
            across = (x - first) / span * (size.width - size.left - size.right)
            return size.left + across, TOP + HEIGHT - (y - low) / (high - low) * HEIGHT

        parts = [*_draw_scale(size, low, high, unit), *draw_axis(size, first, last, axis)]
        if shade is not None:
            left, right = (place(min(max(edge, first), last), low)[0] for edge in shade[:2])
            parts.append(draw_rect(left, TOP, right - left, HEIGHT, "shade", shade[2]))
            parts.append(draw_text(left + 4, TOP + 14, shade[2], "soft"))
        for index, (name, points) in enumerate(curves):
            style = f"line c{index % NUM_COLORS}"
            runs = split_curve(_thin_out(points))
            parts += [draw_path([place(x, y) for x, y in run], style, name) for run in runs]
        legend, height = draw_legend(size, [name for name, _ in curves] if len(curves) > 1 else [], draw_line_sample)
        return [*parts, *shift_down(legend, TOP + HEIGHT + BOTTOM)], TOP + HEIGHT + BOTTOM + height

    return draw_in_sizes(draw, title)


def draw_legend(size: ChartSize, names: Sequence[str], draw_sample: Callable[[int, float, float], Html]) -> Drawing:
    """A sample of each name with the name behind it, in as many rows as they need.

    Args:
        size: The size of the chart.
        names: What the samples stand for.
        draw_sample: Draws the one of that number, 26 pixels wide, around a height.
    """
    left = 8.0 if size.is_narrow else size.left
    letters = int((size.width - left - 34) / LETTER_WIDTH)
    parts, x, y = list[Html](), left, LEGEND_ROW / 2
    for index, name in enumerate(names):
        text = shorten(name, letters)
        width = 64 + LETTER_WIDTH * len(text)  # some fonts are wider
        if x + width > size.width and x > left:
            x, y = left, y + LEGEND_ROW
        parts += [draw_sample(index, x, y), draw_text(x + 32, y + 4, text, "")]
        x += width
    return parts, y + LEGEND_ROW / 2 if names else 0.0


def draw_line_sample(index: int, x: float, y: float) -> Html:
    """A piece of the line of that number, for `draw_legend`."""
    return draw_path([(x, y), (x + 26, y)], f"line c{index % NUM_COLORS}", "")


def draw_fill_sample(index: int, x: float, y: float) -> Html:
    """A square in the color of that number, for `draw_legend`."""
    return draw_rect(x + 7, y - 6, 12, 12, f"fill c{index % NUM_COLORS}", "")


def draw_share_bar(title: str, parts: Sequence[tuple[str, float]]) -> Html:
    """One bar, divided in proportion, with a legend of shares."""
    total = sum(value for _, value in parts) or 1.0
    labels = [f"{name}  {value / total:.1%}" for name, value in parts]

    def draw(size: ChartSize) -> Drawing:
        x, width = size.left, size.width - size.left - size.right
        if size.is_narrow:
            x, width = 8.0, size.width - 16
        drawn = []
        for index, (name, value) in enumerate(parts):
            length = width * value / total
            drawn.append(draw_rect(x, 4, length, 34, f"fill c{index % NUM_COLORS}", f"{name}: {value / total:.1%}"))
            x += length
        legend, height = draw_legend(size, labels, draw_fill_sample)
        return [*drawn, *shift_down(legend, 50)], 50 + height

    return draw_in_sizes(draw, title)


def draw_area_chart(
    title: str, names: Sequence[str], samples: Sequence[tuple[float, Sequence[float]]], unit: str, axis: str = "ms"
) -> Html:
    """Layers over time that add up; each sample has a value for each name, and holds until the next."""
    high = max((sum(values) for _, values in samples), default=1.0) or 1.0
    last = max((time for time, _ in samples), default=1.0) or 1.0

    def draw(size: ChartSize) -> Drawing:
        def place(x: float, y: float) -> tuple[float, float]:
            return size.left + x / last * (size.width - size.left - size.right), TOP + HEIGHT - y / high * HEIGHT

        parts = [*_draw_scale(size, 0.0, high, unit), *draw_axis(size, 0.0, last, axis)]
        below = [0.0] * len(samples)
        for index, name in enumerate(names):
            above = [base + values[index] for base, (_, values) in zip(below, samples, strict=True)]
            edge = [place(time, value) for (time, _), value in zip(samples, above, strict=True)]
            back = [place(time, value) for (time, _), value in zip(samples, below, strict=True)]
            parts.append(draw_path([*edge, *reversed(back)], f"fill c{index % NUM_COLORS}", name, is_closed=True))
            below = above
        legend, height = draw_legend(size, names if len(names) > 1 else [], draw_fill_sample)
        return [*parts, *shift_down(legend, TOP + HEIGHT + BOTTOM)], TOP + HEIGHT + BOTTOM + height

    return draw_in_sizes(draw, title)


def _draw_scale(size: ChartSize, low: float, high: float, unit: str) -> Iterator[Html]:
    for value, label in list_ticks(low, high):
        y = TOP + HEIGHT * (1 - (value - low) / (high - low))
        yield make_element("path", "", d=f"M{size.left:g} {y:.1f} H{size.width - size.right:g}", class_="grid")
        yield draw_text(size.left - 8, y + 4, label, "soft end")
    yield draw_text(size.left - 8, TOP - 12, unit, "soft end")


def draw_axis(size: ChartSize, first: float, last: float, axis: str, top: float = TOP + HEIGHT) -> Iterator[Html]:
    """Labels of the horizontal axis, below `top`."""
    last = last if last > first else first + 1.0
    for value, label in list_ticks(first, last, whole=axis == "step", count=size.num_ticks):
        share = (value - first) / (last - first)
        # A label in the middle of its tick must end within the picture.
        edge = 0.15 if size.is_narrow else 0.04
        kind = "soft" if share < edge else "soft end" if share > 1 - edge else "soft middle"
        text = f"{axis} {label}" if axis == "step" else f"{label} {axis}"
        yield draw_text(size.left + share * (size.width - size.left - size.right), top + 22, text, kind)


def list_ticks(low: float, high: float, *, whole: bool = False, count: int = 5) -> list[tuple[float, str]]:
    """The multiples of 1, 2 or 5 times a power of ten from `low` to `high`, about `count`, and their labels.

    Args:
        low: First value of the axis.
        high: Its last value, above `low`.
        whole: Whether the axis counts something.
        count: Wanted; round numbers give some more or less.
    """
    rough = (high - low) / count
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


def split_curve(points: Points) -> Iterator[list[tuple[float, float]]]:
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


def shift_down(parts: Sequence[Html], height: float) -> list[Html]:
    """Parts as a group that begins at a height."""
    return [make_element("g", Html("\n".join(parts)), transform=f"translate(0 {height:g})")] if parts else []


def shorten(text: str, letters: int) -> str:
    """The beginning of a text that is too long."""
    return text if len(text) <= letters else f"{text[: letters - 3]}..."


def _wrap_chart(size: ChartSize, title: str, parts: Sequence[Html], height: float) -> Html:
    """The picture of parts that use the styles of charts."""
    left = 8.0 if size.is_narrow else size.left
    lines = textwrap.wrap(title, int((size.width - left) / TITLE_LETTER_WIDTH))
    titles = [draw_text(left, 20 + TITLE_ROW * row, line, "title") for row, line in enumerate(lines)]
    top = 10 + TITLE_ROW * len(lines)
    content = [draw_rect(0, 0, size.width, top + height + 8, "ground", ""), *titles, *shift_down(parts, top)]
    # The style of a page applies to all of its pictures. Without a size, the narrow one fills its screen.
    style = [] if size.is_narrow else [make_element("style", Html(STYLE))]
    fixed = {} if size.is_narrow else {"width": f"{size.width:g}", "height": f"{top + height + 8:g}"}
    return make_element(
        "svg",
        Html("\n".join(["", *style, *content, ""])),
        xmlns="http://www.w3.org/2000/svg",
        class_=f"chart {size.name}",
        viewBox=f"0 0 {size.width:g} {top + height + 8:g}",
        **fixed,
        role="img",
    )


STYLE = (
    """
.chart { --ground: #fff; --ink: #1d1f24; --soft: #5d636f; --grid: #e2e3e7; --c0: #0b62c4; --c1: #c2571a; --c2: #2f7d32;
  --c3: #8436a8; --c4: #8a6d00; --c5: #00798c; --c6: #b3261e; --c7: #7a7f8a; margin: 0.75rem 0;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .chart { --ground: #1c1f25; --ink: #e6e7ea; --soft: #a9afbb; --grid: #353a44;
  --c0: #6cb2ff; --c1: #f0a060; --c2: #7fcf83; --c3: #c7a6ee; --c4: #e0c35a; --c5: #5cc8d8; --c6: #ff8a80;
  --c7: #9aa0ac; } }
.chart .ground { fill: var(--ground); } .chart text { font-size: 13px; fill: var(--ink); }
.chart .title { font-size: 15px; font-weight: 650; } .chart .soft { fill: var(--soft); }
.chart .end { text-anchor: end; } .chart .middle { text-anchor: middle; }
.chart path { fill: none; } .chart .grid { stroke: var(--grid); }
.chart .line { stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.chart .dot { stroke-width: 7; } .chart .shade { fill: var(--soft); fill-opacity: 0.18; }
.chart .limit { stroke: var(--c6); stroke-width: 1.6; stroke-dasharray: 6 3; }
.chart .mark { stroke-width: 1.6; } .chart .mark.hollow { fill: var(--ground); }
.chart .bound { stroke: var(--ink); stroke-width: 1.4; }
.chart.narrow { display: none; width: 100%; max-width: 28rem; }
@media screen and (max-width: NARROWpx) { .chart.wide { display: none; } .chart.narrow { display: block; } }
""".replace("NARROW", str(NARROW_SCREEN_PX - 1))
    + "".join(
        f".chart .line.c{i} {{ stroke: var(--c{i}); stroke-dasharray: {dashes or 'none'}; }}"
        f" .chart .fill.c{i} {{ fill: var(--c{i}); }} .chart .mark.c{i} {{ stroke: var(--c{i}); fill: var(--c{i}); }}\n"
        for i, dashes in enumerate(DASHES)
    )
)

"""Charts of single numbers as SVG: values with intervals, pairs of values, values over values.

Each kind of mark has a color and a shape, so that the charts are readable without colors; hollow marks are numbers
from elsewhere.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from msgspec import Struct

from primus.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NUM_COLORS,
    RIGHT,
    TOP,
    WIDTH,
    draw_path,
    draw_rect,
    draw_text,
    draw_title,
    list_ticks,
    wrap_chart,
)
from primus.report.page import Html, make_element
from primus.report.table import format_number

LABEL_WIDTH, VALUE_WIDTH, ROW, TITLE_HEIGHT = 300.0, 190.0, 26.0, 44.0
SIZE = 6.0
NUM_SHAPES = 5
MOST_LETTERS = 44
NOTE_LETTERS, NOTE_ROW = 88, 16.0
LABEL_ROW, LETTER_WIDTH = 14.0, 7.0
"""Of the labels beside points, in pixels."""


class ChartPoint(Struct, frozen=True, kw_only=True):
    """A number with its name."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    kind: int = 0
    """Number of its color and shape."""
    is_hollow: bool = False
    note: str = ""
    """Text after the number."""


class ValuePair(Struct, frozen=True, kw_only=True):
    """Two values of one thing."""

    label: str
    a: float
    b: float
    note: str = ""


class PlacedPoint(Struct, frozen=True, kw_only=True):
    """A point of two numbers."""

    label: str
    x: float
    y: float
    kind: int = 0
    is_hollow: bool = False


def draw_interval_chart(
    title: str, unit: str, points: Sequence[ChartPoint], *, limit: tuple[float, str] | None = None
) -> Html:
    """A row for each number from zero, with its interval; `limit` is a line with its name."""
    ends = [point.high or point.value for point in points] + ([limit[0]] if limit else [])
    highest = max([*ends, 1e-12])
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    bottom = TITLE_HEIGHT + ROW * len(points)
    parts = [draw_title(f"{title} ({unit})" if unit else title)]
    for number, point in enumerate(points):
        y = TITLE_HEIGHT + ROW * (number + 0.5)
        x = LABEL_WIDTH + room * point.value / highest
        parts.append(draw_text(LABEL_WIDTH - 10, y + 4, point.label[:MOST_LETTERS], "end"))
        parts.append(draw_path([(LABEL_WIDTH, y), (WIDTH - VALUE_WIDTH, y)], "grid", ""))
        right = x
        if point.low is not None and point.high is not None:
            edges = [LABEL_WIDTH + room * max(edge, 0.0) / highest for edge in (point.low, point.high)]
            parts += _draw_bounds(edges[0], edges[1], y)
            right = max(right, edges[1])
        parts.append(draw_mark(x, y, point.kind, point.label, is_hollow=point.is_hollow))
        text = f"{format_number(point.value)}{f'  {point.note}' if point.note else ''}"
        parts.append(draw_text(WIDTH - VALUE_WIDTH + 12, y + 4, text, ""))
    if limit:
        x = LABEL_WIDTH + room * limit[0] / highest
        parts.append(draw_path([(x, TITLE_HEIGHT - 4), (x, bottom)], "limit", limit[1]))
        parts.append(draw_text(x - 4, TITLE_HEIGHT - 8, limit[1], "soft end"))
    parts.append(draw_path([(LABEL_WIDTH, TITLE_HEIGHT - 4), (LABEL_WIDTH, bottom)], "grid", ""))
    return wrap_chart(parts, bottom + 12)


def draw_paired_dots(title: str, unit: str, names: tuple[str, str], pairs: Sequence[ValuePair]) -> Html:
    """A row for each pair: both values on one scale, joined by a line; the note stands below."""
    highest = max([each for pair in pairs for each in (pair.a, pair.b)] + [1e-12])
    room, y = WIDTH - LABEL_WIDTH - VALUE_WIDTH, TITLE_HEIGHT
    parts = [draw_title(f"{title} ({unit})")]
    for index, name in enumerate(names):
        x = LABEL_WIDTH + 150 * index
        parts += [draw_mark(x, 36, index, name), draw_text(x + 12, 40, name, "")]
    for pair in pairs:
        y += ROW
        places = [LABEL_WIDTH + room * value / highest for value in (pair.a, pair.b)]
        parts.append(draw_text(LABEL_WIDTH - 10, y + 4, pair.label[:MOST_LETTERS], "end"))
        parts.append(draw_path([(LABEL_WIDTH, y), (WIDTH - VALUE_WIDTH, y)], "grid", ""))
        parts.append(draw_path([(min(places), y), (max(places), y)], "bound", ""))
        parts += [draw_mark(x, y, index, names[index]) for index, x in enumerate(places)]
        text = f"{format_number(pair.a)} and {format_number(pair.b)}"
        parts.append(draw_text(WIDTH - VALUE_WIDTH + 12, y + 4, text, ""))
        for line in textwrap.wrap(pair.note, NOTE_LETTERS):
            y += NOTE_ROW
            parts.append(draw_text(LABEL_WIDTH, y + 4, line, "soft"))
        y += ROW - NOTE_ROW
    return wrap_chart(parts, y + ROW)


def draw_scatter(title: str, x_unit: str, y_unit: str, points: Sequence[PlacedPoint], *, joined: bool = False) -> Html:
    """Points from zero on both axes with their names; `joined` connects those of one kind in order of x."""
    highest = max([point.x for point in points] + [1e-12]), max([point.y for point in points] + [1e-12])
    bottom = TOP + HEIGHT

    def place(point: PlacedPoint) -> tuple[float, float]:
        x = LEFT + point.x / (1.05 * highest[0]) * (WIDTH - LEFT - RIGHT - 120)
        return x, bottom - point.y / (1.1 * highest[1]) * HEIGHT

    parts = [draw_title(title), draw_text(LEFT - 8, TOP - 12, y_unit, "soft end")]
    for value, label in list_ticks(0.0, highest[1]):
        y = bottom - value / (1.1 * highest[1]) * HEIGHT
        parts.append(draw_path([(LEFT, y), (WIDTH - RIGHT, y)], "grid", ""))
        parts.append(draw_text(LEFT - 8, y + 4, label, "soft end"))
    for value, label in list_ticks(0.0, highest[0]):
        x = LEFT + value / (1.05 * highest[0]) * (WIDTH - LEFT - RIGHT - 120)
        parts.append(draw_text(x, bottom + 20, label, "soft middle"))
    parts.append(draw_text(WIDTH - RIGHT, bottom + 20, x_unit, "soft end"))
    if joined:
        for kind in dict.fromkeys(point.kind for point in points):
            line = sorted((point for point in points if point.kind == kind), key=lambda point: point.x)
            if len(line) > 1:
                parts.append(draw_path([place(point) for point in line], f"line c{kind % NUM_COLORS}", ""))
    places = [place(point) for point in points]
    for point, (x, y), (start, label_y) in zip(points, places, _spread_labels(points, places), strict=True):
        is_left = start < x
        if label_y != y:
            parts.append(draw_path([(x, y), (x - 9 if is_left else x + 9, label_y)], "grid", ""))
        parts.append(draw_mark(x, y, point.kind, point.label, is_hollow=point.is_hollow))
        text = point.label[:MOST_LETTERS]
        parts.append(draw_text(x - 10 if is_left else x + 10, label_y + 4, text, "end" if is_left else ""))
    return wrap_chart(parts, bottom + BOTTOM)


def _spread_labels(points: Sequence[PlacedPoint], places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where the label of each point begins, left of a point near the edge, and its height: that of the point, or the
    nearest at which it meets no other label."""
    taken: list[tuple[float, float, float]] = []
    for point, (x, y) in zip(points, places, strict=True):
        width = 10 + LETTER_WIDTH * len(point.label[:MOST_LETTERS])
        x = x - width if x + width > WIDTH else x
        end = x + width
        shifts = (side * row * LABEL_ROW for row in range(2 * len(points) + 1) for side in (-1, 1))
        label_y = next(
            y + shift
            for shift in shifts
            if y + shift > TOP
            and not any(
                abs(y + shift - other_y) < LABEL_ROW and x < other_end and other_x < end
                for other_x, other_end, other_y in taken
            )
        )
        taken.append((x, end, label_y))
    return [(x, label_y) for x, _, label_y in taken]


def draw_mark(x: float, y: float, kind: int, label: str, *, is_hollow: bool = False) -> Html:
    """Circle, square, triangle, diamond or a triangle on its tip."""
    style = f"mark c{kind % NUM_COLORS}{' hollow' if is_hollow else ''}"
    shape = kind % NUM_SHAPES
    if shape == 0:
        tip = make_element("title", label)
        return make_element("circle", tip, cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{SIZE:g}", class_=style)
    if shape == 1:
        return draw_rect(x - SIZE + 0.5, y - SIZE + 0.5, 2 * SIZE - 1, 2 * SIZE - 1, style, label)
    return draw_path(list(_list_corners(x, y, shape)), style, label, is_closed=True)


def _list_corners(x: float, y: float, shape: int) -> Iterator[tuple[float, float]]:
    """The corners of a polygon: its number of sides, and where the first one points."""
    sides, start = {2: (3, -90), 3: (4, -90)}.get(shape, (3, 90))
    for number in range(sides):
        angle = math.radians(start + 360 * number / sides)
        yield x + 1.25 * SIZE * math.cos(angle), y + 1.25 * SIZE * math.sin(angle)


def _draw_bounds(low: float, high: float, y: float) -> list[Html]:
    """A line between two bounds, with an end at each."""
    ends = [draw_path([(x, y - 5), (x, y + 5)], "bound", "") for x in (low, high)]
    return [draw_path([(low, y), (high, y)], "bound", ""), *ends]

"""Charts of single numbers as SVG: values with intervals, pairs of values, values over values.

Each kind of mark has a color and a shape, so that the charts are readable without colors; hollow marks are numbers
from elsewhere.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from primus.report.charts import (
    BOTTOM,
    HEIGHT,
    LETTER_WIDTH,
    NUM_COLORS,
    TOP,
    ChartSize,
    Drawing,
    draw_in_sizes,
    draw_legend,
    draw_path,
    draw_rect,
    draw_text,
    list_ticks,
    shift_down,
    shorten,
)
from primus.report.page import Html, make_element
from primus.report.table import format_number

LABEL_WIDTH, VALUE_WIDTH, ROW = 300.0, 190.0, 26.0
NARROW_ROW, NARROW_EDGE = 56.0, 12.0
"""On narrow screens the label stands above its row, and the number below it."""
SIZE = 6.0
NUM_SHAPES = 5
MOST_LETTERS = 40
NOTE_ROW = 16.0
LABEL_ROW = 14.0
"""Of the labels beside points."""


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


class _ValueRows:
    """Rows on one horizontal scale from zero, each with a label and a text: beside the row, or above and below it."""

    def __init__(self, size: ChartSize, highest: float, top: float) -> None:
        self.size = size
        self.left, self.right = (NARROW_EDGE, NARROW_EDGE) if size.is_narrow else (LABEL_WIDTH, VALUE_WIDTH)
        self.y = top
        self.parts: list[Html] = []
        self._scale = (size.width - self.left - self.right) / max(highest, 1e-12)

    def place(self, value: float) -> float:
        """Where a value stands."""
        return self.left + self._scale * max(value, 0.0)

    def add_row(self, label: str, text: str) -> float:
        """The line of a row with its label and text; gives its height."""
        size, end = self.size, self.size.width - self.right
        if size.is_narrow:
            y = self.y + 28
            self.parts.append(draw_text(self.left, y - 12, shorten(label, MOST_LETTERS), ""))
            self.parts.append(draw_text(end, y + 19, text, "soft end"))
        else:
            y = self.y + ROW / 2
            self.parts.append(draw_text(self.left - 10, y + 4, shorten(label, MOST_LETTERS), "end"))
            self.parts.append(draw_text(end + 12, y + 4, text, ""))
        self.parts.append(draw_path([(self.left, y), (end, y)], "grid", ""))
        self.y += NARROW_ROW if size.is_narrow else ROW
        return y

    def add_note(self, note: str) -> None:
        """Text below a row."""
        room = self.size.width - self.left - (NARROW_EDGE if self.size.is_narrow else 0.0)
        for line in textwrap.wrap(note, int(room / (LETTER_WIDTH - 0.4))):
            self.parts.append(draw_text(self.left, self.y + 6, line, "soft"))
            self.y += NOTE_ROW
        self.y += ROW - NOTE_ROW


def draw_interval_chart(
    title: str, unit: str, points: Sequence[ChartPoint], *, limit: tuple[float, str] | None = None
) -> Html:
    """A row for each number from zero, with its interval; `limit` is a line with its name."""
    highest = max([*(point.high or point.value for point in points), limit[0] if limit else 0.0])

    def draw(size: ChartSize) -> Drawing:
        top = 20.0 if limit else 4.0
        rows = _ValueRows(size, highest, top)
        for point in points:
            y = rows.add_row(point.label, f"{format_number(point.value)}{f'  {point.note}' if point.note else ''}")
            if point.low is not None and point.high is not None:
                rows.parts += _draw_bounds(rows.place(point.low), rows.place(point.high), y)
            mark = draw_mark(rows.place(point.value), y, point.kind, point.label, is_hollow=point.is_hollow)
            rows.parts.append(mark)
        if limit:
            x = rows.place(limit[0])
            rows.parts.append(draw_path([(x, top - 4), (x, rows.y)], "limit", limit[1]))
            rows.parts.append(draw_text(x - 4, top - 8, limit[1], "soft end"))
        rows.parts.append(draw_path([(rows.left, top - 4), (rows.left, rows.y)], "grid", ""))
        return rows.parts, rows.y + 4

    return draw_in_sizes(draw, f"{title} ({unit})" if unit else title)


def draw_paired_dots(title: str, unit: str, names: tuple[str, str], pairs: Sequence[ValuePair]) -> Html:
    """A row for each pair: both values on one scale, joined by a line; the note stands below."""
    highest = max([each for pair in pairs for each in (pair.a, pair.b)], default=0.0)

    def draw(size: ChartSize) -> Drawing:
        rows = _ValueRows(size, highest, 8.0)
        for pair in pairs:
            y = rows.add_row(pair.label, f"{format_number(pair.a)} and {format_number(pair.b)}")
            places = [rows.place(value) for value in (pair.a, pair.b)]
            rows.parts.append(draw_path([(min(places), y), (max(places), y)], "bound", ""))
            rows.parts += [draw_mark(x, y, index, names[index]) for index, x in enumerate(places)]
            rows.add_note(pair.note)
        legend, height = draw_legend(size, names, lambda index, x, y: draw_mark(x + 13, y, index, names[index]))
        return [*rows.parts, *shift_down(legend, rows.y + 8)], rows.y + 8 + height

    return draw_in_sizes(draw, f"{title} ({unit})")


def draw_scatter(title: str, x_unit: str, y_unit: str, points: Sequence[PlacedPoint], *, joined: bool = False) -> Html:
    """Points from zero on both axes with their names; `joined` connects those of one kind in order of x.

    On narrow screens, where names beside the points do not fit, they are numbers of a legend.
    """
    highest = max([point.x for point in points] + [1e-12]), max([point.y for point in points] + [1e-12])
    bottom = TOP + HEIGHT

    def draw(size: ChartSize) -> Drawing:
        room = size.width - size.left - size.right - (0 if size.is_narrow else 120)

        def place(point: PlacedPoint) -> tuple[float, float]:
            return size.left + point.x / (1.05 * highest[0]) * room, bottom - point.y / (1.1 * highest[1]) * HEIGHT

        parts = [draw_text(size.left - 8, TOP - 12, y_unit, "soft end")]
        for value, label in list_ticks(0.0, highest[1]):
            y = bottom - value / (1.1 * highest[1]) * HEIGHT
            parts.append(draw_path([(size.left, y), (size.width - size.right, y)], "grid", ""))
            parts.append(draw_text(size.left - 8, y + 4, label, "soft end"))
        for value, label in list_ticks(0.0, highest[0], count=size.num_ticks):
            x = size.left + value / (1.05 * highest[0]) * room
            parts.append(draw_text(x, bottom + 20, label, "soft middle"))
        # In the row of its labels where there is room behind them.
        unit_y = bottom + (38 if size.is_narrow else 20)
        parts.append(draw_text(size.width - size.right, unit_y, x_unit, "soft end"))
        if joined:
            for kind in dict.fromkeys(point.kind for point in points):
                line = sorted((point for point in points if point.kind == kind), key=lambda point: point.x)
                if len(line) > 1:
                    parts.append(draw_path([place(point) for point in line], f"line c{kind % NUM_COLORS}", ""))
        labels = [str(number) if size.is_narrow else point.label for number, point in enumerate(points, 1)]
        named = [structs.replace(point, label=label) for point, label in zip(points, labels, strict=True)]
        parts += _draw_named_points(named, [place(point) for point in points], size.width)
        height = bottom + BOTTOM
        if not size.is_narrow:
            return parts, height
        names = [f"{number}: {point.label}" for number, point in enumerate(points, 1)]
        legend, more = draw_legend(
            size,
            names,
            lambda index, x, y: draw_mark(x + 13, y, points[index].kind, "", is_hollow=points[index].is_hollow),
        )
        return [*parts, *shift_down(legend, height + 14)], height + 14 + more

    return draw_in_sizes(draw, title)


def _draw_named_points(
    points: Sequence[PlacedPoint], places: Sequence[tuple[float, float]], width: float
) -> Iterator[Html]:
    for point, (x, y), (start, label_y) in zip(points, places, _spread_labels(points, places, width), strict=True):
        is_left = start < x
        if label_y != y:
            yield draw_path([(x, y), (x - 9 if is_left else x + 9, label_y)], "grid", "")
        yield draw_mark(x, y, point.kind, point.label, is_hollow=point.is_hollow)
        text = shorten(point.label, MOST_LETTERS)
        yield draw_text(x - 10 if is_left else x + 10, label_y + 4, text, "end" if is_left else "")


def _spread_labels(
    points: Sequence[PlacedPoint], places: Sequence[tuple[float, float]], chart_width: float
) -> list[tuple[float, float]]:
    """Where the label of each point begins, left of a point near the edge, and its height: that of the point, or the
    nearest at which it meets no other label."""
    taken: list[tuple[float, float, float]] = []
    for point, (x, y) in zip(points, places, strict=True):
        width = 10 + LETTER_WIDTH * len(shorten(point.label, MOST_LETTERS))
        x = x - width if x + width > chart_width else x
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

"""Histograms for the terminal and as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from primus.report import table
from primus.report.page import Html, make_element

BLOCKS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
"""Eighths of a character cell."""

COLUMNS = 40
"""Characters of the longest bar."""

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 880.0, 260.0, 24.0, 92.0, 70.0, 6.0
"""Size of the picture in its own units; HEIGHT is that of the highest bar."""


MANY_DIGITS = 100_000
"""Larger numbers are shown in units of 1,024 under a bar of the picture."""


class HistogramBar(Struct, frozen=True, kw_only=True):
    """Count and weight of a range of integers."""

    first: int
    """Smallest number."""
    last: int
    """Largest number."""
    count: int
    """Number of items."""
    weight: int
    """Their sum, such as the tokens of these documents."""


def format_text_histogram(bars: Sequence[HistogramBar], things: str, unit: str) -> str:
    """One bar per range, with its share of the count and of the sum.

    Args:
        bars: The ranges, in order.
        things: Name of the counted items, such as ``documents``.
        unit: Name of the summed unit, such as ``tokens``.
    """
    highest, _, weight = _compute_totals(bars)
    rows = [
        (
            f"{bar.first:,} - {bar.last:,}" if bar.last > bar.first else f"{bar.first:,}",
            f"{bar.count:,}",
            f"{bar.weight / weight:.1%}",
            format_block_bar(bar.count / highest),
        )
        for bar in bars
    ]
    return table.format_table((unit, things, f"of all {unit}", ""), rows, right=(0, 1, 2))


def format_block_bar(share: float) -> str:
    """A bar of block characters in proportion to `COLUMNS`; a share above 0 is always visible."""
    eighths = max(round(8 * COLUMNS * share), 1 if share > 0 else 0)
    whole, rest = divmod(eighths, 8)
    return BLOCKS[8] * whole + (BLOCKS[rest] if rest else "")


def draw_histogram_svg(bars: Sequence[HistogramBar], title: str, things: str, unit: str) -> Html:
    """SVG picture with two bars per range, for the count and the sum; usable alone or inside a page."""
    height = TOP + HEIGHT + BOTTOM
    parts = [
        make_element("style", Html(STYLE)),
        _draw_bar(0, 0, WIDTH, height, "ground", ""),
        _draw_label(LEFT, 32, title, "title"),
        _draw_bar(LEFT, 46, 12, 12, "count", ""),
        _draw_label(LEFT + 18, 56, f"share of {things}", "soft"),
        _draw_bar(LEFT + 170, 46, 12, 12, "weight", ""),
        _draw_label(LEFT + 188, 56, f"share of {unit}", "soft"),
        *_draw_columns(bars, things, unit),
        _draw_label(
            WIDTH / 2,
            height - 14,
            f"each bar: {things} with at least this many {unit}, up to the next bar",
            "soft middle",
        ),
    ]
    return make_element(
        "svg",
        Html("\n".join(["", *parts, ""])),
        xmlns="http://www.w3.org/2000/svg",
        class_="histogram",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        width=f"{WIDTH:g}",
        height=f"{height:g}",
        role="img",
    )


def _draw_columns(bars: Sequence[HistogramBar], things: str, unit: str) -> Iterator[Html]:
    _, total, weight = _compute_totals(bars)
    highest = max((max(bar.count / total, bar.weight / weight) for bar in bars), default=1.0)
    pitch = (WIDTH - 2 * LEFT) / max(1, len(bars))
    width = min((pitch - GAP) / 2, 34.0)
    base = TOP + HEIGHT
    yield _draw_bar(LEFT, base, WIDTH - 2 * LEFT, 1, "axis", "")
    for number, bar in enumerate(bars):
        middle = LEFT + (number + 0.5) * pitch
        shares = (("count", bar.count / total), ("weight", bar.weight / weight))
        for side, (kind, share) in enumerate(shares):
            tall = HEIGHT * share / highest
            label = f"{bar.first:,} to {bar.last:,}: {bar.count:,} {things}, {bar.weight:,} {unit}"
            yield _draw_bar(middle + (side - 1) * width, base - tall, width, tall, kind, label)
            if share >= 0.001 and pitch >= 40:
                place = middle + (side - 0.5) * width
                yield _draw_label(place, base - tall - 5, f"{share:.0%}" if share >= 0.01 else "<1%", "small middle")
        yield _draw_label(middle, base + 18, _format_short_number(bar.first), "small middle")


def _compute_totals(bars: Sequence[HistogramBar]) -> tuple[int, int, int]:
    """The highest count, the sum of counts and the sum of weights, each at least 1."""
    return (
        max(1, max((bar.count for bar in bars), default=0)),
        max(1, sum(bar.count for bar in bars)),
        max(1, sum(bar.weight for bar in bars)),
    )


def _format_short_number(number: int) -> str:
    """A number that fits under its bar."""
    if number < MANY_DIGITS:
        return f"{number:,}"
    return f"{number >> 10:,} Ki" if number < MANY_DIGITS << 10 else f"{number >> 20:,} Mi"


def _draw_bar(x: float, y: float, width: float, height: float, kind: str, label: str) -> Html:
    title = make_element("title", label) if label else Html("")
    return make_element(
        "rect", title, x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=f"{height:.1f}", class_=kind
    )


def _draw_label(x: float, y: float, words: str, kind: str) -> Html:
    return make_element("text", words, x=f"{x:.1f}", y=f"{y:.1f}", class_=kind)


STYLE = """
.histogram { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.histogram .ground { fill: #ffffff; } .histogram text { fill: #1d1f24; }
.histogram .title { font-size: 17px; font-weight: 650; }
.histogram .soft { fill: #5d636f; } .histogram .small { font-size: 11px; fill: #5d636f; }
.histogram .middle { text-anchor: middle; }
.histogram .count { fill: #2456a6; } .histogram .weight { fill: #e0a24a; } .histogram .axis { fill: #b8bcc6; }
@media (prefers-color-scheme: dark) {
  .histogram .ground { fill: #1c1f25; } .histogram text { fill: #e6e7ea; }
  .histogram .soft, .histogram .small { fill: #a0a6b2; }
  .histogram .count { fill: #8ab4f8; } .histogram .weight { fill: #c98a35; } .histogram .axis { fill: #4a505c; } }
"""

"""The result of a benchmark as a self-contained page with a picture."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from primus.benchmark import BenchmarkResult, BenchmarkRow
from primus.report import page
from primus.report.benchmark_table import (
    build_columns,
    describe_result,
    format_case,
    format_value,
    is_less_better,
    list_varying_names,
)
from primus.report.charts import draw_rect, draw_text
from primus.report.page import Html, make_element
from primus.report.table import format_duration, format_number, format_unit

WIDTH, ROW_HEIGHT, LABEL_WIDTH, VALUE_WIDTH, TOP = 880.0, 24.0, 330.0, 170.0, 40.0
"""Size of the picture in its own units."""
MOST_BARS = 60
"""Rows of a picture; the table has all."""
LABEL_LETTERS = 38
"""Letters of a label that fit next to the bars."""


def format_page(result: BenchmarkResult) -> str:
    """The page."""
    hosts = sorted({rank.host for rank in result.ranks})
    devices = sorted({rank.device_name for rank in result.ranks})
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.started))
    subtitle = (
        f"{', '.join(devices)}; {result.world_size} process{'es' * (result.world_size > 1)} on {', '.join(hosts)}; "
        f"{when}, {format_duration(result.duration_s)}"
    )
    sections: list[tuple[str, object]] = []
    if result.problem:
        sections.append(("", page.join_fragments(page.make_badge("fail"), page.make_paragraph(result.problem))))
    pictures = page.join_fragments(*draw_pictures(result.rows))
    if pictures:
        sections.append(("Pictures", pictures))
    if result.rows:
        header, body, right = build_columns(result.rows, result.world_size)
        sections.append(("Rows", page.make_table(header, body, right)))
    sections.append(("How it was measured", _describe(result)))
    return page.format_page(f"benchmark {result.benchmark}", sections, subtitle)


def _describe(result: BenchmarkResult) -> Html:
    lines = [make_element("li", line) for line in describe_result(result)]
    settings = {**result.libraries, **{name: format_value(value) for name, value in _list_settings(result)}}
    telemetry = [
        (
            f"{rank.host} GPU {each.gpu}",
            format_number(each.clock_mean_mhz),
            format_number(each.power_mean_w),
            format_number(each.temperature_max_c),
            ", ".join(f"{reason} {count}x" for reason, count in each.throttled.items()) or "no",
        )
        for rank in result.ranks
        for each in rank.telemetry
    ]
    parts: list[object] = [make_element("ul", page.join_fragments(*lines))]
    if telemetry:
        header = ("GPU", "clock MHz", "power W", "temperature \u00b0C", "throttled")
        parts.append(page.make_table(header, telemetry, right=(1, 2, 3)))
    parts.append(page.make_table(("setting", "value"), list(settings.items())))
    return page.join_fragments(*parts)


def _list_settings(result: BenchmarkResult) -> Iterator[tuple[str, str]]:
    for name, value in result.options.items():
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if value not in (None, "", [], False):
            yield name, text


def draw_pictures(rows: Sequence[BenchmarkRow]) -> Iterator[Html]:
    """A picture for each unit: a bar for each row, and a mark at the device's limit."""
    for unit in dict.fromkeys(row.unit for row in rows if row.unit):
        shown = [row for row in rows if row.unit == unit and row.value]
        yield _draw_bars(shown[:MOST_BARS], unit)


def _draw_bars(rows: Sequence[BenchmarkRow], unit: str) -> Html:
    names = list_varying_names(rows)
    ends = [row.interval[1] if row.interval else row.value or 0.0 for row in rows]
    peaks = [row.peak for row in rows if row.peak]
    highest = max([*ends, *peaks, 1e-12])
    room = WIDTH - LABEL_WIDTH - VALUE_WIDTH
    title = f"{format_unit(unit)}{_describe_unit(unit, peaks)}"
    parts = [make_element("style", Html(STYLE)), draw_text(0, 20, title, "title")]
    for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
        top, value = TOP + number * ROW_HEIGHT, row.value or 0.0
        width = room * value / highest
        tip = f"{format_case(row.case)}: {format_number(value)} {format_unit(unit)}"
        parts += [
            draw_text(LABEL_WIDTH - 8, top + 15, _format_label(row, names), "end"),
            draw_rect(LABEL_WIDTH, top + 3, width, ROW_HEIGHT - 8, "value", tip),
        ]
        if row.interval:
            low, high = (room * each / highest for each in row.interval)
            parts.append(draw_rect(LABEL_WIDTH + low, top + 10, max(high - low, 1.0), 2, "spread", ""))
        right = max(width, room * end / highest)
        if row.peak:
            place = room * row.peak / highest
            right = max(right, place)
            parts.append(draw_rect(LABEL_WIDTH + place - 1, top + 1, 2, ROW_HEIGHT - 4, "peak", ""))
        share = f" ({row.share:.0%})" if row.share else ""
        parts.append(draw_text(LABEL_WIDTH + right + 8, top + 15, f"{format_number(value)}{share}", ""))
    height = TOP + len(rows) * ROW_HEIGHT + 8
    return make_element(
        "svg",
        Html("\n".join(parts)),
        xmlns="http://www.w3.org/2000/svg",
        class_="bars",
        viewBox=f"0 0 {WIDTH:g} {math.ceil(height)}",
        role="img",
        aria_label=f"{format_unit(unit)} of each row",
    )


def _format_label(row: BenchmarkRow, names: Sequence[str]) -> str:
    """What tells a row from the others: words stand for themselves, numbers have their names."""
    case = {name: row.case.get(name) for name in names} or row.case
    words = [value for value in case.values() if isinstance(value, str) and value]
    numbers = {name: value for name, value in case.items() if not isinstance(value, str)}
    rank = {"rank": row.rank} if row.rank else {}
    label = " ".join(filter(None, (*words, format_case({**numbers, **rank}))))
    return label if len(label) <= LABEL_LETTERS else f"{label[: LABEL_LETTERS - 3]}..."


def _describe_unit(unit: str, peaks: Sequence[float]) -> str:
    better = "less is better" if is_less_better(unit) else "more is better"
    return f" ({better}{'; the line is the limit of the device' if peaks else ''})"


STYLE = """
.bars { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; width: 100%; }
.bars text { fill: #1d1f24; } .bars .title { font-weight: 650; } .bars .end { text-anchor: end; }
.bars .value { fill: #2456a6; } .bars .spread { fill: #e0a24a; } .bars .peak { fill: #b3261e; }
@media (prefers-color-scheme: dark) {
  .bars text { fill: #e6e7ea; } .bars .value { fill: #8ab4f8; } .bars .spread { fill: #c98a35; }
  .bars .peak { fill: #ff8a80; } }"""

"""The result of a benchmark as a self-contained page with a picture."""

from __future__ import annotations

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
from primus.report.charts import LETTER_WIDTH, ChartSize, Drawing, draw_in_sizes, draw_rect, draw_text, shorten
from primus.report.page import Html, make_element
from primus.report.table import format_duration, format_number, format_unit

ROW_HEIGHT, LABEL_WIDTH, VALUE_WIDTH = 24.0, 330.0, 170.0
NARROW_ROW_HEIGHT, EDGE = 44.0, 8.0
"""On narrow screens label and number stand above the bar."""
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

    def draw(size: ChartSize) -> Drawing:
        left, height = (EDGE, NARROW_ROW_HEIGHT) if size.is_narrow else (LABEL_WIDTH, ROW_HEIGHT)
        scale = (size.width - left - (EDGE if size.is_narrow else VALUE_WIDTH)) / highest
        parts = []
        for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
            value, top = row.value or 0.0, number * height
            share = f" ({row.share:.0%})" if row.share else ""
            number_text, label = f"{format_number(value)}{share}", _format_label(row, names)
            if size.is_narrow:  # on a line of their own
                letters = int((size.width - 2 * EDGE) / LETTER_WIDTH) - len(number_text)
                parts += [draw_text(left, top + 15, shorten(label, letters), "")]
                parts += [draw_text(size.width - EDGE, top + 15, number_text, "end")]
                top += NARROW_ROW_HEIGHT - ROW_HEIGHT
            else:
                right = left + scale * max(end, row.peak or 0.0)
                parts += [draw_text(left - 8, top + 15, shorten(label, LABEL_LETTERS), "end")]
                parts += [draw_text(right + 8, top + 15, number_text, "")]
            tip = f"{format_case(row.case)}: {format_number(value)} {format_unit(unit)}"
            parts.append(draw_rect(left, top + 3, scale * value, ROW_HEIGHT - 8, "fill c0", tip))
            if row.interval:
                low, high = (scale * each for each in row.interval)
                parts.append(draw_rect(left + low, top + 10, max(high - low, 1.0), 2, "fill c1", ""))
            if row.peak:
                parts.append(draw_rect(left + scale * row.peak - 1, top + 1, 2, ROW_HEIGHT - 4, "fill c6", ""))
        return parts, len(rows) * height

    return draw_in_sizes(draw, f"{format_unit(unit)}{_describe_unit(unit, peaks)}")


def _format_label(row: BenchmarkRow, names: Sequence[str]) -> str:
    """What tells a row from the others: words stand for themselves, numbers have their names."""
    case = {name: row.case.get(name) for name in names} or row.case
    words = [value for value in case.values() if isinstance(value, str) and value]
    numbers = {name: value for name, value in case.items() if not isinstance(value, str)}
    rank = {"rank": row.rank} if row.rank else {}
    return " ".join(filter(None, (*words, format_case({**numbers, **rank}))))


def _describe_unit(unit: str, peaks: Sequence[float]) -> str:
    better = "less is better" if is_less_better(unit) else "more is better"
    return f" ({better}{'; the line is the limit of the device' if peaks else ''})"

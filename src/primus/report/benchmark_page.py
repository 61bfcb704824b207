"""The result of a benchmark as a self-contained page with a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from primus.benchmark import BenchmarkResult, BenchmarkRow
from primus.report import page
from primus.report.bar_chart import ChartBar, draw_bar_chart
from primus.report.benchmark_table import (
    build_columns,
    describe_result,
    format_case,
    format_value,
    is_less_better,
    list_varying_names,
)
from primus.report.page import Html, make_element
from primus.report.table import format_duration, format_number, format_unit

MOST_BARS = 60
"""Rows of a picture; the table has all."""


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
    bars = [
        ChartBar(
            label=_format_label(row, names),
            value=row.value or 0.0,
            text=f"{format_number(row.value)}{f' ({row.share:.0%})' if row.share else ''}",
            tip=f"{format_case(row.case)}: {format_number(row.value)} {format_unit(unit)}",
            interval=row.interval,
            limit=row.peak,
        )
        for row in rows
    ]
    peaks = [row.peak for row in rows if row.peak]
    return draw_bar_chart(f"{format_unit(unit)}{_describe_unit(unit, peaks)}", bars)


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

"""Results of benchmarks as flat records, and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from primus.benchmark import BenchmarkResult, BenchmarkRow, CaseValue
from primus.report.table import format_number, format_table, format_unit, format_value_name

Record = dict[str, CaseValue]
"""A row with its columns by name."""
LAST_CASE_COLUMN = "rank"
"""Columns up to this one identify a row; those after it were measured."""
SLOW_SHARE = 0.9
"""A rank below this share of the median of all ranks is slow; ranks of a healthy node differ by 5 % at most
(AMD-AGI/Primus-SaFE, variance rule of its diagnosis)."""
CONTENDED = 0.05
"""Share of waiting for cores above which other processes may decide the result, as in `primus.runs.gate`."""
TIME_UNITS = ("us", "s")
"""Units of which less is better."""


def list_records(result: BenchmarkResult) -> list[Record]:
    """One record for each row; all have the same columns."""
    case_names = list(dict.fromkeys(name for row in result.rows for name in row.case))
    figure_names = list(dict.fromkeys(name for row in result.rows for name in row.figures))
    return [_make_record(row, rank.device_name, case_names, figure_names) for rank in result.ranks for row in rank.rows]


def list_varying_names(rows: Sequence[BenchmarkRow]) -> list[str]:
    """Names of the case that differ between rows."""
    names = dict.fromkeys(name for row in rows for name in row.case)
    return [name for name in names if len({row.case.get(name) for row in rows}) > 1]


def _make_record(row: BenchmarkRow, device: str, case_names: Sequence[str], figure_names: Sequence[str]) -> Record:
    timing, interval = row.timing, row.interval or (None, None)
    times = (timing.median_s, timing.p5_s, timing.p95_s, timing.mad_s) if timing else ()
    names = ("median_us", "p5_us", "p95_us", "mad_us")
    return {
        **{name: row.case.get(name) for name in case_names},
        "device": device,
        LAST_CASE_COLUMN: row.rank,
        "value": row.value,
        "unit": row.unit,
        "low": interval[0],
        "high": interval[1],
        **(dict.fromkeys(names) if timing is None else {name: s * 1e6 for name, s in zip(names, times, strict=True)}),
        "samples": timing.n if timing else None,
        "is_settled": timing.is_settled if timing else None,
        "peak": row.peak,
        "share": row.share,
        "bound": row.bound,
        **{name: row.figures.get(name) for name in figure_names},
        "wrong": row.wrong,
        "problem": row.problem,
        "convention": row.convention,
    }


def format_case(case: Mapping[str, CaseValue]) -> str:
    """A case as text: ``M=4096 N=4096 dtype=bf16``."""
    return " ".join(f"{name}={value}" for name, value in case.items() if value not in (None, ""))


def format_value(value: CaseValue, digits: int = 4) -> str:
    """A column's value as text; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_number(value, digits) if isinstance(value, float) else str(value)


def format_result_table(result: BenchmarkResult) -> str:
    """The rows with what people compare, then conventions, limits and notes."""
    rows = result.rows
    if not rows:
        return "no rows"
    header, body, right = build_columns(rows, result.world_size)
    parts = [format_table(header, body, right), "", *describe_result(result)]
    return "\n".join(parts)


HIGHEST_SHARE = 1.05
"""Limits that are measured are exceeded by a few percent, when other processes disturbed their measurement."""


def build_columns(rows: Sequence[BenchmarkRow], world_size: int) -> tuple[list[str], list[list[str]], list[int]]:
    """Header, cells and the numbers of numeric columns; empty columns are omitted."""
    columns: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in row.case):
        columns[format_value_name(name)] = [format_value(row.case.get(name)) for row in rows]
    num_texts = len(columns)
    if world_size > 1:
        columns["rank"] = ["all" if row.rank is None else str(row.rank) for row in rows]
    columns["median"] = [_format_time(row.timing.median_s) if row.timing else "" for row in rows]
    columns["p5 - p95"] = [
        f"{_format_time(row.timing.p5_s)} - {_format_time(row.timing.p95_s)}" if row.timing else "" for row in rows
    ]
    units = [unit for unit in dict.fromkeys(row.unit for row in rows) if unit]
    for unit in units if any(unit not in TIME_UNITS for unit in units) else []:
        columns[format_unit(unit)] = [_format_with_interval(row) if row.unit == unit else "" for row in rows]
    for name in dict.fromkeys(name for row in rows for name in row.figures):
        cells = [format_number(row.figures[name]) if name in row.figures else "" for row in rows]
        # A rate may be the value of some rows and a further figure of others.
        known = columns.get(format_value_name(name), cells)
        columns[format_value_name(name)] = [value or cell for value, cell in zip(known, cells, strict=True)]
    columns["of peak"] = [f"{row.share:.1%}" if row.share is not None else "" for row in rows]
    columns["bound by"] = [row.bound for row in rows]
    columns["problem"] = [row.problem for row in rows]
    kept = [name for name, cells in columns.items() if any(cells)]
    last_number = len(kept) - sum(name in kept for name in ("bound by", "problem"))
    right = list(range(sum(name in kept for name in list(columns)[:num_texts]), last_number))
    return kept, [list(cells) for cells in zip(*(columns[name] for name in kept), strict=True)], right


def describe_result(result: BenchmarkResult) -> list[str]:
    """Lines below the table: conventions, limits of the devices, notes."""
    cluster = result.options.get("cluster")
    lines = [f"cluster: {cluster}"] if cluster else []
    lines += [f"counted: {text}" for text in dict.fromkeys(row.convention for row in result.rows) if text]
    devices = dict.fromkeys((rank.device_name, rank.peaks.source) for rank in result.ranks if rank.device_name)
    lines += [_describe_device(*device) for device in devices]
    unsettled = sum(row.timing is not None and not row.timing.is_settled for row in result.rows)
    if unsettled:
        lines.append(f"note: {unsettled} of {len(result.rows)} rows did not become steady during the warm-up")
    impossible = [row for row in result.rows if (row.share or 0.0) > HIGHEST_SHARE]
    if impossible:
        worst = max(impossible, key=lambda row: row.share or 0.0)
        lines.append(
            f"warning: {len(impossible)} of {len(result.rows)} rows exceed the limit of their device, up to"
            f" {worst.share:.1%} of peak ({format_case(worst.case)}): the operations or bytes of a call, its time, or"
            " the limit are wrong"
        )
    waits = [rank.core_wait_share or 0.0 for rank in result.ranks]
    if waits and max(waits) > CONTENDED:
        lines.append(
            f"note: threads waited up to {max(waits):.0%} of the time for a core: other processes make rows slower;"
            " measure again on an idle machine"
        )
    return [*lines, *(f"note: {note}" for note in result.notes)]


def _describe_device(name: str, source: str) -> str:
    return f"device: {name}; its limits: {source}" if source else f"device: {name}"


def _format_with_interval(row: BenchmarkRow) -> str:
    if row.value is None:
        return ""
    if row.timing is None or row.timing.interval_s is None:
        return format_number(row.value)
    low, high = row.timing.interval_s
    return f"{format_number(row.value)} \u00b1{(high - low) / 2 / row.timing.median_s:.1%}"


def _format_time(seconds: float) -> str:
    for limit, unit, factor in ((1e-3, "\u00b5s", 1e6), (1.0, "ms", 1e3)):
        if seconds < limit:
            return f"{format_number(seconds * factor)} {unit}"
    return f"{format_number(seconds)} s"


def is_less_better(unit: str) -> bool:
    """Whether a figure of this unit is a time."""
    return unit in TIME_UNITS


def find_slow_ranks(result: BenchmarkResult) -> list[str]:
    """A sentence for each rank whose rows are slower than the median of all ranks in half of its cases or more."""
    by_case: dict[str, dict[int, float]] = {}
    for row in result.rows:
        if row.rank is not None and row.value:
            speed = 1 / row.value if is_less_better(row.unit) else row.value
            by_case.setdefault(format_case(row.case), {})[row.rank] = speed
    shares: dict[int, list[float]] = {}
    for speeds in by_case.values():
        if len(speeds) > 1:
            middle = median(speeds.values())
            for rank, speed in speeds.items():
                shares.setdefault(rank, []).append(speed / middle)
    hosts = {rank.rank: rank.host for rank in result.ranks}
    return [
        f"rank {rank} on {hosts.get(rank, '')} is slow: {median(found):.0%} of the median of all ranks"
        for rank, found in sorted(shares.items())
        if median(found) < SLOW_SHARE
    ]

"""Rows of a benchmark against those of a baseline."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from primus.errors import UsageError
from primus.report.benchmark_table import LAST_CASE_COLUMN, Record, format_case, is_less_better
from primus.report.table import format_number, format_table, format_unit


class RowComparison(Struct, frozen=True, kw_only=True):
    """One row of both results."""

    case: str
    rank: str
    unit: str
    before: float
    now: float | None
    """None if the case failed this time."""
    change: float | None
    """Relative change of the speed: -0.1 is 10 % slower."""
    is_slower: bool


def compare_records(before: Sequence[Record], now: Sequence[Record], tolerance: float) -> list[RowComparison]:
    """Every row that both results have; the last of several equal ones of the baseline counts.

    A row is slower if its value is beyond the tolerance, and the confidence intervals, as far as they are known, do not
    overlap: so noise alone rarely makes a row slower.

    Raises:
        UsageError: No row has a counterpart.
    """
    known = {find_record_key(record): record for record in before}
    pairs = [(known[find_record_key(record)], record) for record in now if find_record_key(record) in known]
    found = [_compare_pair(*pair, tolerance) for pair in pairs if _read_number(pair[0], "value") is not None]
    if not found:
        devices = [", ".join(dict.fromkeys(str(record.get("device")) for record in part)) for part in (before, now)]
        problem = "no row of the baseline has the same case"
        if before and devices[0] != devices[1]:
            problem += f": it was measured on {devices[0]}, not on {devices[1]}"
        raise UsageError(problem, "measure the baseline on this device with the same options")
    return found


def find_record_key(record: Record) -> tuple[tuple[str, str], ...]:
    """What identifies a row, as text, since a file may hold only text."""
    names = list(record)
    case = names[: names.index(LAST_CASE_COLUMN) + 1]
    return tuple(sorted((name, str(record[name])) for name in case if record[name] not in (None, "")))


def _compare_pair(before: Record, now: Record, tolerance: float) -> RowComparison:
    old, new, unit = _read_number(before, "value"), _read_number(now, "value"), str(now["unit"] or before["unit"])
    assert old is not None
    if now["unit"] and before["unit"] != now["unit"]:
        raise UsageError(f"the baseline is in {before['unit']}, the result in {now['unit']}", "measure it again")
    less = is_less_better(unit)
    change = None if new is None else (old / new if less else new / old) - 1
    is_slower = change is None or (change < -tolerance and not _overlap(before, now))
    names = list(now)
    case = {name: now[name] for name in names[: names.index(LAST_CASE_COLUMN)]}
    rank = now[LAST_CASE_COLUMN]
    return RowComparison(
        case=format_case(case), rank="all" if rank is None else str(rank), unit=unit,
        before=old, now=new, change=change, is_slower=is_slower,
    )  # fmt: skip


def _overlap(before: Record, now: Record) -> bool:
    ends = [_read_number(record, name) for record in (before, now) for name in ("low", "high")]
    if None in ends:
        return False
    old_low, old_high, new_low, new_high = (end or 0.0 for end in ends)
    return new_low <= old_high and old_low <= new_high


def _read_number(record: Record, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def format_comparison(found: Sequence[RowComparison], tolerance: float) -> str:
    """The rows that are slower, or a sentence if there are none."""
    slower = [each for each in found if each.is_slower]
    if not slower:
        return f"baseline: none of {len(found)} rows is slower by more than {tolerance:.1%}"
    rows = [
        (
            each.case,
            each.rank,
            f"{format_number(each.before)} {format_unit(each.unit)}",
            f"{format_number(each.now)} {format_unit(each.unit)}" if each.now is not None else "failed",
            f"{each.change:+.1%}" if each.change is not None else "",
        )
        for each in slower
    ]
    table = format_table(("case", "rank", "baseline", "now", "speed"), rows, right=(2, 3, 4))
    return f"baseline: {len(slower)} of {len(found)} rows are slower by more than {tolerance:.1%}\n{table}"

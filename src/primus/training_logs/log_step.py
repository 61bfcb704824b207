"""What one line of a log says about a step."""

from __future__ import annotations

from datetime import date
from functools import lru_cache

from msgspec import Struct

OF_ALL_RANKS = "memory_gib"
"""Field of which the largest value counts; of the others that of the rank that speaks for all."""
NO_RANK = -1
"""Rank of a line without one, where ranks are an array."""


class LogStep(Struct):
    """What one line says about a step."""

    values: dict[str, float]
    """Values by field of the table. NaN: the value is not a finite number; a field is missing if it is not printed."""
    rank: int | None = None
    time_s: float | None = None
    """Time stamp of the line."""


def parse_clock(number: int) -> float | None:
    """Seconds between an unspecified instant and a time stamp, whose digits `YYYYMMDDhhmmss` are the number."""
    day, clock = divmod(number, 1_000_000)
    days = _count_days(day)
    return None if days is None else days * 86400.0 + clock // 10_000 * 3600 + clock // 100 % 100 * 60 + clock % 100


@lru_cache(maxsize=64)
def _count_days(day: int) -> int | None:
    try:
        return date(day // 10_000, day // 100 % 100, day % 100).toordinal()
    except ValueError:
        return None

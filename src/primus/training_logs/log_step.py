"""What one line of a log says about a step."""

from __future__ import annotations

from msgspec import Struct

OF_ALL_RANKS = "memory_gib"
"""Field of which the largest value counts; of the others that of the rank that speaks for all."""
NO_RANK = -1
"""Rank of a line without one, where ranks are an array."""


class LogStep(Struct):
    """What one line says about a step."""

    values: dict[str, float]
    """By field of the table. NaN: the value is not a finite number; a field is missing if it is not printed."""
    rank: int | None = None
    time_s: float | None = None
    """Time stamp of the line."""

"""Where the values of a step stand in a line, and in all lines that differ from it in digits only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from primus.training_logs.log_step import LogStep, parse_clock


class NumberPlace(NamedTuple):
    """Where a number stands in a line; its value is `number * factor / divisor`."""

    start: int
    end: int
    factor: float = 1.0
    divisor: float = 1.0


class LineLayout(Struct, frozen=True, kw_only=True):
    """Where the values of a step stand in a line, and in each line that differs from it in digits only."""

    places: Mapping[str, NumberPlace]
    """Place of each number by field of the table."""
    words: Mapping[str, float]
    """Values that are words: `nan`, `inf`."""
    rank: tuple[int, int] | None = None
    """Start and end of the number of the rank."""
    clock: tuple[int, ...] = ()
    """Positions of the digits of the year, month, day, hour, minute and second."""
    lacks_loss: bool = False
    """Whether the loss is missing, which means that it is not a finite number unless the step is skipped."""
    settings: Mapping[str, tuple[int, int]] = {}
    """Start and end of settings of the run."""

    def read_line(self, line: bytes) -> LogStep:
        """The step of one line."""
        values = dict(self.words)
        for name, place in self.places.items():
            values[name] = float(line[place.start : place.end].replace(b",", b"")) * place.factor / place.divisor
        if self.lacks_loss and not values.get("num_skipped"):
            values["loss"] = math.nan
        rank = int(line[slice(*self.rank)]) if self.rank else None
        digits = bytes(line[position] for position in self.clock)
        return LogStep(values, rank, parse_clock(int(digits)) if digits else None)

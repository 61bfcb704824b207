"""Steps as lines of a log say them: one by one, and by column where many lines are alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

OF_ALL_RANKS = "memory_gib"
"""Field of which the largest value counts; of the others that of the rank that speaks for all."""


class LogStep(Struct):
    """What one line says about a step."""

    values: dict[str, float]
    """By field of the table. NaN: the value is not a finite number; a field is missing if it is not printed."""
    rank: int | None = None
    time_s: float | None = None
    """Time stamp of the line."""


class RowOrigins(NamedTuple):
    """Where rows come from."""

    ranks: Sequence[int | None]
    times: Sequence[float | None]
    """Time stamps."""


class StepRows:
    """What many lines say about steps, by column.

    Args:
        columns: By field of the table; NaN where a line does not have the value.
        find_origins: Finds the rank and the time stamp of some rows, which most logs do not need.
    """

    def __init__(
        self, columns: Mapping[str, Sequence[float]], find_origins: Callable[[Sequence[int]], RowOrigins]
    ) -> None:
        self.columns = columns
        self.find_origins = find_origins

    def __len__(self) -> int:
        return len(self.columns["step"])

    def group_by_step(self) -> dict[float, list[int]]:
        """Places of the rows of each step."""
        groups: dict[float, list[int]] = {}
        for place, step in enumerate(self.columns["step"]):
            group = groups.get(step)
            if group is None:
                groups[step] = [place]
            else:
                group.append(place)
        return groups

    def are_equal(self, a: int, b: int) -> bool:
        """Whether two rows have the same values."""
        pairs = [(column[a], column[b]) for column in self.columns.values()]
        return all(x == y or (x != x and y != y) for x, y in pairs)

    def take(self, places: Sequence[int]) -> StepRows:
        """Some rows."""
        columns = {name: [column[place] for place in places] for name, column in self.columns.items()}
        return StepRows(columns, lambda chosen: self.find_origins([places[place] for place in chosen]))

    def list_steps(self) -> list[LogStep]:
        """One step for each row."""
        ranks, times = self.find_origins(range(len(self)))
        rows = zip(*self.columns.values(), strict=True)
        return [
            LogStep(dict(zip(self.columns, row, strict=True)), rank, time_s)
            for row, rank, time_s in zip(rows, ranks, times, strict=True)
        ]


def have_same_times(
    rows: StepRows, groups: Iterable[Sequence[int]], times: Sequence[float | None], resolution_s: float
) -> bool:
    """Whether the rows of each step are printed at the same time, as far as lines have time stamps."""
    step_times = rows.columns.get("step_time_s")
    for group in groups:
        known = [time_s for time_s in map(times.__getitem__, group) if time_s is not None] if len(group) > 1 else ()
        if not known:
            continue
        step_time_s = step_times[group[0]] if step_times else 0.0
        if max(known) - min(known) > resolution_s + (0.5 * step_time_s if math.isfinite(step_time_s) else 0.0):
            return False
    return True


def merge_groups(
    rows: StepRows, groups: Sequence[Sequence[int]], ranks: Sequence[int | None], *, prefers_last: bool
) -> tuple[dict[str, list[float]], list[int]]:
    """One row for each group, and the place of the row that speaks for it; a value that it lacks is of another row."""
    known = [rank for rank in ranks if rank is not None]
    choose = max if prefers_last else min
    can_choose = len(known) == len(ranks)
    chosen = [choose(group, key=known.__getitem__) if len(group) > 1 and can_choose else group[0] for group in groups]
    merged: dict[str, list[float]] = {}
    for name, column in rows.columns.items():
        if name == OF_ALL_RANKS:
            found = [[value for value in map(column.__getitem__, group) if value == value] for group in groups]
            merged[name] = [max(values, default=math.nan) for values in found]
            continue
        values = [column[place] for place in chosen]
        for number, value in enumerate(values) if any(map(math.isnan, values)) else ():
            if value != value:
                values[number] = next((each for place in groups[number] if (each := column[place]) == each), math.nan)
        merged[name] = values
    return merged, chosen

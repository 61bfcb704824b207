"""Steps as columns of arrays, with what merges the lines of several ranks.

Needs NumPy, which takes a tenth of a second to import: only readers of long logs import this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.training_logs.log_step import NO_RANK, OF_ALL_RANKS, LogStep, parse_clock

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
NO_CLOCK = 0


class StepRows(NamedTuple):
    """What many lines say about steps, in the order of the lines.

    Each has a loss, which is NaN if it is not a finite number. In other columns NaN also stands for a missing value.
    """

    columns: Mapping[str, Floats]
    """Values by field of the table."""
    ranks: NDArray[np.int64]
    clocks: NDArray[np.int64]
    """Time stamps to the second, as numbers `YYYYMMDDhhmmss`."""

    @property
    def steps(self) -> Floats:
        """The column of the steps."""
        return self.columns["step"]

    def take(self, places: Places | slice | list[int]) -> StepRows:
        """Some rows."""
        columns = {name: column[places] for name, column in self.columns.items()}
        return StepRows(columns, self.ranks[places], self.clocks[places])

    def compute_times(self) -> Floats:
        """Time stamp of each row in seconds; NaN without one."""
        known, inverse = np.unique(self.clocks, return_inverse=True)
        times = [None if clock == NO_CLOCK else parse_clock(clock) for clock in known.tolist()]
        return np.array([math.nan if time_s is None else time_s for time_s in times])[inverse]

    def list_steps(self) -> list[LogStep]:
        """One step for each row."""
        columns = [column.tolist() for column in self.columns.values()]
        return [
            LogStep(
                dict(zip(self.columns, values, strict=True)),
                None if rank == NO_RANK else rank,
                None if clock == NO_CLOCK else parse_clock(clock),
            )
            for rank, clock, *values in zip(self.ranks.tolist(), self.clocks.tolist(), *columns, strict=True)
        ]


class StepGroups(NamedTuple):
    """Rows of the same step."""

    order: Places
    """Places of the rows, by step; those of one step in the order of their lines."""
    firsts: Places
    """Index in `order` at which each step begins."""
    counts: NDArray[np.intp]
    """Rows of each step."""


def join_rows(parts: Sequence[StepRows]) -> StepRows:
    """Rows one after the other; a column that a part lacks is NaN there."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.columns)
    missing = [np.full(len(part.ranks), math.nan) for part in parts]
    return StepRows(
        {
            name: np.concatenate([part.columns.get(name, nan) for part, nan in zip(parts, missing, strict=True)])
            for name in names
        },
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.clocks for part in parts]),
    )


def group_by_step(rows: StepRows) -> StepGroups:
    """The rows of each step, by step."""
    order = np.argsort(rows.steps, kind="stable")
    steps = rows.steps[order]
    firsts = np.flatnonzero(np.concatenate(([True], steps[1:] != steps[:-1])))
    return StepGroups(order, firsts, np.diff(np.append(firsts, len(steps))))


def are_in_order(rows: StepRows, latest: Mapping[int, float]) -> bool:
    """Whether no rank goes back, except to print a line twice.

    Args:
        rows: Rows that have ranks.
        latest: Last step of each rank before them.
    """
    order = np.argsort(rows.ranks, kind="stable")
    ranks, steps = rows.ranks[order], rows.steps[order]
    is_same_rank = ranks[1:] == ranks[:-1]
    goes_back = np.flatnonzero(is_same_rank & ~(steps[1:] > steps[:-1]))
    for column in (rows.clocks, *rows.columns.values()) if len(goes_back) else ():
        before, after = column[order[goes_back]], column[order[goes_back + 1]]
        if not (before == after).all() and not np.array_equal(before, after, equal_nan=True):
            return False
    firsts = np.flatnonzero(np.concatenate(([True], ~is_same_rank)))
    pairs = zip(ranks[firsts].tolist(), steps[firsts].tolist(), strict=True)
    return all(step > latest.get(rank, -math.inf) for rank, step in pairs)


def measure_delay(rows: StepRows, open_steps: Sequence[float]) -> float:
    """By how many steps a line is behind the newest step before it, at most; infinite if its step is before that of
    an earlier line that is the first one of its step.

    Args:
        rows: The lines.
        open_steps: Steps of earlier lines, by step.
    """
    places = np.unique(np.concatenate((open_steps, rows.steps)), return_inverse=True)[1]
    newest = np.maximum.accumulate(places)
    is_first = np.zeros(len(places), np.bool_)
    is_first[np.unique(places, return_index=True)[1]] = True
    return math.inf if (is_first & (places < newest)).any() else float((newest - places).max())


def have_same_times(rows: StepRows, groups: StepGroups, resolution_s: float) -> bool:
    """Whether the rows of each step are printed at the same time, as far as lines have time stamps."""
    if not rows.clocks.any():
        return True
    times = rows.compute_times()[groups.order]
    spans = np.fmax.reduceat(times, groups.firsts) - np.fmin.reduceat(times, groups.firsts)
    step_times = rows.columns["step_time_s"][groups.order]
    step_times = np.minimum.reduceat(np.where(np.isfinite(step_times), step_times, 0.0), groups.firsts)
    limits = resolution_s + 0.5 * step_times
    return not bool((spans > limits).any())


def merge_groups(rows: StepRows, groups: StepGroups, *, prefers_last: bool) -> tuple[dict[str, Floats], Places]:
    """One row for each step, and the place of the row that speaks for it.

    A value that it lacks is that of the row that spoke before it, or the first one that another row has.
    """
    numbers = np.arange(len(rows.ranks))
    speaks = np.zeros(len(numbers), np.bool_)
    speaks[groups.firsts] = True
    if (rows.ranks != NO_RANK).all():
        ranks = rows.ranks[groups.order]
        ranks = ranks if prefers_last else ranks.max() - ranks
        records = np.maximum.accumulate(
            np.repeat(np.arange(len(groups.firsts)), groups.counts) * (ranks.max() + 1) + ranks
        )
        speaks[1:] |= records[1:] > records[:-1]
    chosen = groups.order[np.maximum.reduceat(np.where(speaks, numbers, -1), groups.firsts)]
    merged = {}
    for name, column in rows.columns.items():
        values, in_order = column[chosen], column[groups.order]
        if name == OF_ALL_RANKS:
            values = np.fmax.reduceat(in_order, groups.firsts)
        elif np.isnan(values).any():
            is_known = ~np.isnan(in_order)
            spoken = np.maximum.reduceat(np.where(is_known & speaks, numbers, -1), groups.firsts)
            first = np.minimum.reduceat(np.where(is_known, numbers, len(numbers)), groups.firsts)
            values = np.append(in_order, math.nan)[np.where(spoken >= 0, spoken, first)]
        merged[name] = values
    return merged, chosen

"""One series of steps from the lines of all ranks and of all attempts.

Lines of several ranks interleave, a line may be printed twice, and a restart goes back to an earlier step. Steps are
open for a while, until all ranks have printed them; then they become rows of the table:

    step above all others       a new open step
    the same line again         ignored
    a step that is open         the line of another rank: its values complete the step
    any other step              a restart: rows from this step on are discarded, since the run repeats them

Whether a line is of another rank is known from its rank; without ranks, from the time between both lines, or from the
number of lines that earlier steps have.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct

from primus.training_logs.log_step import NO_RANK, OF_ALL_RANKS, LogStep
from primus.training_logs.step_table import StepTable

if TYPE_CHECKING:
    from primus.training_logs.step_rows import Floats, StepGroups, StepRows

MAX_OPEN = 64
"""Steps by which one rank may print later than another."""
SAME_TIME_S = 1.0
"""Resolution of time stamps: ranks print a step within this time and half of a step."""


class LogAttempt(Struct, frozen=True, kw_only=True):
    """Steps between two starts of the run."""

    first_step: int
    last_step: int
    num_steps: int


class _OpenStep(Struct):
    values: dict[str, float]
    rank: int | None
    time_s: float | None
    lines: dict[int | None, LogStep]
    """Last line of each rank."""
    num_lines: int = 1
    rows: StepRows | None = None
    """Lines before those, as far as they were read by column."""

    def find_line(self, rank: int | None) -> LogStep | None:
        """The last line of a rank."""
        if self.rows is not None:
            self.lines = {found.rank: found for found in self.rows.list_steps()} | self.lines
            self.rows = None
        return self.lines.get(rank)


class StepMerger:
    """Merges steps into a table.

    Args:
        table: Where complete steps go.
        prefers_last_rank: Whether the last rank speaks for all, as in Megatron-LM, instead of the first.
    """

    def __init__(self, table: StepTable, *, prefers_last_rank: bool = False) -> None:
        self.table = table
        self.attempts: list[LogAttempt] = []
        self.ranks: set[int] = set()
        self.num_copies = 0
        """Lines beyond the first one of a step."""
        self.num_nonfinite_losses = 0
        self.has_derived_times = False
        """Whether times of steps are differences of time stamps, since the log does not print them."""
        self._last_time_s: float | None = None
        self._prefers_last_rank = prefers_last_rank
        self._open: dict[float, _OpenStep] = {}
        self._rank_steps: dict[int, float] = {}
        """Last step of each rank in this attempt."""
        self._first_step = self._last_step = math.nan
        self._num_steps = 0
        self._lines_per_step = 0
        """Most lines that a step has which other steps have followed; 0 if there is none."""

    @property
    def lines_per_step(self) -> int:
        """Number of ranks that print, as far as the log shows it."""
        return max(1, len(self.ranks), self._lines_per_step)

    def add_step(self, found: LogStep) -> None:
        """Add what a line says."""
        step = found.values["step"]
        if found.rank is not None:
            self.ranks.add(found.rank)
        if not step > self._last_step and self._num_steps:
            if self._is_copy(found):
                self._complete_step(found)
                return
            self._end_attempt()
            self.table.truncate(step)
        self._open_step(found)

    def add_rows(self, parts: Sequence[StepRows]) -> None:
        """Add what many lines say, in the order of the lines."""
        from primus.training_logs.step_rows import join_rows

        rows = join_rows(parts)
        is_behind = ~(rows.steps > self._last_step) if self._num_steps else rows.steps < 0
        # Lines about steps that are open.
        behind = len(is_behind) if is_behind.all() else int(is_behind.argmin())
        for found in rows.take(slice(behind)).list_steps():
            self.add_step(found)
        rows = rows.take(slice(behind, None))
        if len(rows.ranks) and not self._add_new_steps(rows) and not self._merge_ranks(rows):
            for found in rows.list_steps():
                self.add_step(found)

    def _add_new_steps(self, rows: StepRows) -> bool:
        """Add rows of which each is a new step; False if some may be of another rank or attempt."""
        steps = rows.steps
        if self._lines_per_step > 1 or (self._num_steps and not steps[0] > self._last_step):
            return False
        if not (steps[1:] > steps[:-1]).all():
            return False
        # Lines about the last steps may follow.
        first_open = max(0, len(steps) - MAX_OPEN)
        if first_open:
            closed = rows.take(slice(first_open))
            self._close_steps(0)
            self._start_steps(steps[0], first_open)
            self._lines_per_step = 1
            self._note_ranks(closed)
            self._last_step, self._last_time_s = float(closed.steps[-1]), None
            self._extend_table(closed.columns)
        for found in rows.take(slice(first_open, None)).list_steps():
            self.add_step(found)
        return True

    def _merge_ranks(self, rows: StepRows) -> bool:
        """Add rows of several ranks; False, and nothing is done, if the run may have restarted between them."""
        from primus.training_logs.step_rows import group_by_step, have_same_times, measure_delay

        is_late = (rows.steps[:, None] == list(self._open)).any(axis=1)
        late_steps = rows.take(is_late.nonzero()[0]).list_steps()
        new = rows.take((~is_late).nonzero()[0])
        if not len(new.ranks) or new.steps.min() <= self._last_step:
            return False
        groups = group_by_step(new)
        if measure_delay(rows, sorted(self._open)) >= MAX_OPEN or not have_same_times(new, groups, SAME_TIME_S):
            return False
        if not self._is_in_order(rows) or not all(map(self._is_of_other_rank, late_steps)):
            return False
        for found in late_steps:
            self._complete_step(found)
        self._note_ranks(rows)
        self._add_groups(new, groups)
        return True

    def _is_of_other_rank(self, late: LogStep) -> bool:
        """Whether a line about an open step is certainly not one after a restart."""
        known = self._open[late.values["step"]]
        step_time_s = min(each.values.get("step_time_s", 0.0) for each in (known, late))
        same_time = _is_same_time(known, late, step_time_s)
        return (late.rank is None) == (known.rank is None) and same_time is not False

    def _is_in_order(self, rows: StepRows) -> bool:
        """Whether no rank goes back, except to print a line twice."""
        from primus.training_logs.step_rows import are_in_order

        if not (rows.ranks == NO_RANK).any():
            return are_in_order(rows, self._rank_steps)
        counts = Counter(rows.steps.tolist())
        known = Counter({step: each.num_lines for step, each in self._open.items()})
        return max((counts + known).values()) <= self._lines_per_step

    def _add_groups(self, rows: StepRows, groups: StepGroups) -> None:
        """Add steps of which each has the rows of several ranks."""
        from primus.training_logs.step_rows import merge_groups

        firsts = groups.order[groups.firsts]
        steps, counts = rows.steps[firsts].tolist(), groups.counts.tolist()
        self._start_steps(steps[0], len(steps))
        self._lines_per_step = max([self._lines_per_step, *counts[:-1], *(e.num_lines for e in self._open.values())])
        self.num_copies += sum(counts) - len(steps)
        self._last_step, self._last_time_s = steps[-1], rows.take(firsts[-1:]).list_steps()[0].time_s
        merged, chosen = merge_groups(rows, groups, prefers_last=self._prefers_last_rank)
        # Lines about the last steps may follow.
        first_open = max(0, len(steps) - MAX_OPEN)
        if first_open:
            self._close_steps(0)
            self._extend_table({name: column[:first_open] for name, column in merged.items()})
        spoken, first_lines = rows.take(chosen[first_open:]).list_steps(), rows.take(firsts[first_open:]).list_steps()
        for number in range(first_open, len(steps)):
            start, count = int(groups.firsts[number]), counts[number]
            values = {name: float(column[number]) for name, column in merged.items()}
            rank, time_s = spoken[number - first_open].rank, first_lines[number - first_open].time_s
            lines = rows.take(groups.order[start : start + count])
            self._open[steps[number]] = _OpenStep(values, rank, time_s, {}, count, lines)
        self._close_steps(MAX_OPEN)

    def _note_ranks(self, rows: StepRows) -> None:
        """Note the ranks of rows, and the last step of each."""
        is_one_rank = (rows.ranks == rows.ranks[0]).all()
        last = rows.take(slice(-1, None)) if is_one_rank else rows
        self._rank_steps.update(zip(last.ranks.tolist(), last.steps.tolist(), strict=True))
        self._rank_steps.pop(NO_RANK, None)
        self.ranks.update(self._rank_steps)

    def _start_steps(self, first: float, count: int) -> None:
        if not self._num_steps:
            self._first_step = float(first)
        self._num_steps += count

    def _extend_table(self, columns: Mapping[str, Floats]) -> None:
        loss = columns["loss"]
        self.num_nonfinite_losses += len(loss) - int((abs(loss) < math.inf).sum())
        self.table.extend({name: array("d", column.tobytes()) for name, column in columns.items()})

    def close(self) -> None:
        """Add the last steps to the table."""
        if self._num_steps:
            self._end_attempt()

    def _open_step(self, found: LogStep) -> None:
        step = found.values["step"]
        if not self._num_steps:
            self._first_step = step
        else:
            ended = [each.num_lines for each_step, each in self._open.items() if each_step < self._last_step]
            self._lines_per_step = max([self._lines_per_step, *ended])
        self._derive_time(found)
        self._last_step, self._last_time_s = step, found.time_s
        self._num_steps += 1
        self._open[step] = _OpenStep(dict(found.values), found.rank, found.time_s, {found.rank: found})
        if found.rank is not None:
            self._rank_steps[found.rank] = step
        self._close_steps(MAX_OPEN)

    def _derive_time(self, found: LogStep) -> None:
        step = found.values["step"]
        if "step_time_s" in found.values or found.time_s is None or self._last_time_s is None:
            return
        passed_s = found.time_s - self._last_time_s
        if passed_s > 0 and step > self._last_step:
            found.values["step_time_s"] = passed_s / (step - self._last_step)
            self.has_derived_times = True

    def _is_copy(self, found: LogStep) -> bool:
        """Whether a line about a step that is not new is of another rank, or printed twice; else the run restarted."""
        step = found.values["step"]
        known = self._open.get(step)
        if known is None:
            return False
        before = known.find_line(found.rank)
        if before is not None and before.time_s == found.time_s and _have_same_values(before, found):
            return True
        is_near = _is_same_time(known, found, known.values.get("step_time_s", 0.0))
        if found.rank is not None and known.rank is not None:
            return step > self._rank_steps.get(found.rank, -math.inf) and is_near is not False
        if self._lines_per_step:
            return known.num_lines < self._lines_per_step and is_near is not False
        return is_near if is_near is not None else step == self._last_step

    def _complete_step(self, found: LogStep) -> None:
        step = found.values["step"]
        known = self._open[step]
        self.num_copies += 1
        known.num_lines += 1
        known.lines[found.rank] = found
        speaks = False
        if found.rank is not None:
            self._rank_steps[found.rank] = max(step, self._rank_steps.get(found.rank, step))
            if known.rank is not None:
                speaks = found.rank > known.rank if self._prefers_last_rank else found.rank < known.rank
        for name, value in found.values.items():
            before = known.values.get(name, math.nan)
            if name == OF_ALL_RANKS:
                known.values[name] = max((each for each in (before, value) if each == each), default=math.nan)
            elif math.isnan(before) or (speaks and not math.isnan(value)):
                known.values[name] = value
        if speaks:
            known.rank = found.rank

    def _close_steps(self, most: int) -> None:
        """Move the first open steps to the table, so that at most so many stay open."""
        steps = sorted(self._open)[: max(0, len(self._open) - most)]
        closed = [self._open.pop(step).values for step in steps]
        self.num_nonfinite_losses += sum(not math.isfinite(values.get("loss", 0.0)) for values in closed)
        if closed:
            names = dict.fromkeys(chain.from_iterable(closed))
            self.table.extend({name: [values.get(name, math.nan) for values in closed] for name in names})

    def _end_attempt(self) -> None:
        # Lines per step of an attempt that ends within its first steps.
        self._lines_per_step = max([self._lines_per_step, *(each.num_lines for each in self._open.values())])
        self._close_steps(0)
        first, last = int(self._first_step), int(self._last_step)
        self.attempts.append(LogAttempt(first_step=first, last_step=last, num_steps=self._num_steps))
        self._num_steps = 0
        self._rank_steps.clear()


def _is_same_time(known: _OpenStep, found: LogStep, step_time_s: float) -> bool | None:
    """Whether two lines about a step are printed at the same time; None if one has no time stamp."""
    if known.time_s is None or found.time_s is None:
        return None
    limit = SAME_TIME_S + (0.5 * step_time_s if math.isfinite(step_time_s) else 0.0)
    return abs(found.time_s - known.time_s) <= limit


def _have_same_values(a: LogStep, b: LogStep) -> bool:
    names = a.values.keys() | b.values.keys()
    pairs = [(a.values.get(name, math.nan), b.values.get(name, math.nan)) for name in names]
    return all(x == y or (x != x and y != y) for x, y in pairs)

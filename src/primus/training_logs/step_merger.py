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
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from operator import lt

from msgspec import Struct

from primus.training_logs.step_rows import OF_ALL_RANKS, LogStep, StepRows, have_same_times, merge_groups
from primus.training_logs.step_table import StepTable

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

    def add_rows(self, rows: StepRows) -> None:
        """Add what many lines say, in the order of the lines."""
        steps = rows.columns["step"]
        # Lines about steps that are open.
        behind = next((place for place, step in enumerate(steps) if not step <= self._last_step), len(steps))
        for found in rows.take(range(behind)).list_steps() if behind else ():
            self.add_step(found)
        if behind:
            rows = rows.take(range(behind, len(steps)))
        if len(rows) and not self._add_new_steps(rows) and not self._merge_ranks(rows):
            for found in rows.list_steps():
                self.add_step(found)

    def _add_new_steps(self, rows: StepRows) -> bool:
        """Add rows of which each is a new step; False if some may be of another rank or attempt."""
        steps = rows.columns["step"]
        if self._lines_per_step > 1 or (self._num_steps and not steps[0] > self._last_step):
            return False
        if not all(map(lt, steps, islice(steps, 1, None))):
            return False
        # Another rank may still print the last step.
        complete = {name: column[:-1] for name, column in rows.columns.items()}
        if len(steps) > 1:
            self._close_steps(0)
            self._start_steps(steps[0], len(steps) - 1)
            self._lines_per_step = 1
            self._last_step, self._last_time_s = steps[-2], None
            self._extend_table(complete)
        self.add_step(rows.take([len(steps) - 1]).list_steps()[0])
        return True

    def _merge_ranks(self, rows: StepRows) -> bool:
        """Add rows of several ranks; False, and nothing is done, if the run may have restarted between them."""
        ranks, times = rows.find_origins(range(len(rows)))
        groups = rows.group_by_step()
        late = rows.take(sorted(chain.from_iterable(groups[step] for step in groups.keys() & self._open.keys())))
        late_steps = late.list_steps() if late else []
        groups = {step: places for step, places in sorted(groups.items()) if step not in self._open}
        is_behind = bool(groups) and next(iter(groups)) <= self._last_step
        if is_behind or any(_is_same_time(self._open[each.values["step"]], each) is False for each in late_steps):
            return False
        if not self._is_in_order(rows, ranks) or not have_same_times(rows, groups.values(), times, SAME_TIME_S):
            return False
        for found in late_steps:
            self._complete_step(found)
        if groups:
            self._add_groups(rows, groups)
        return True

    def _is_in_order(self, rows: StepRows, ranks: Sequence[int | None]) -> bool:
        """Whether no rank goes back, except to print a line twice."""
        steps = rows.columns["step"]
        if None in ranks:
            counts = Counter(steps)
            known = sum((Counter({step: each.num_lines}) for step, each in self._open.items()), Counter())
            return max((counts + known).values()) <= self._lines_per_step
        latest = self._rank_steps.copy()
        for place, (step, rank) in enumerate(zip(steps, ranks, strict=True)):
            assert rank is not None
            if not step > latest.get(rank, -math.inf):
                before = next((each for each in range(place - 1, -1, -1) if ranks[each] == rank), None)
                if before is None or not rows.are_equal(before, place):
                    return False
            latest[rank] = step
        return True

    def _add_groups(self, rows: StepRows, groups: Mapping[float, Sequence[int]]) -> None:
        """Add steps of which each has the rows of several ranks."""
        ranks, times = rows.find_origins(range(len(rows)))
        steps = list(groups)
        counts = [len(group) for group in groups.values()]
        self._start_steps(steps[0], len(steps))
        self._lines_per_step = max([self._lines_per_step, *counts[:-1], *(e.num_lines for e in self._open.values())])
        self.num_copies += sum(counts) - len(steps)
        self.ranks.update(rank for rank in ranks if rank is not None)
        for rank, step in zip(ranks, rows.columns["step"], strict=True):
            if rank is not None:
                self._rank_steps[rank] = step
        self._last_step, self._last_time_s = steps[-1], times[groups[steps[-1]][0]]
        merged, chosen = merge_groups(rows, list(groups.values()), ranks, prefers_last=self._prefers_last_rank)
        # Ranks print a step at different times: from the first one on that lacks some, steps stay open.
        are_open = any(each.num_lines < self._lines_per_step for each in self._open.values())
        whole = next((i for i, count in enumerate(counts[:-1]) if count < self._lines_per_step), len(steps) - 1)
        whole = max(0 if are_open else whole, len(steps) - MAX_OPEN)
        if whole:
            self._close_steps(0)
            self._extend_table({name: column[:whole] for name, column in merged.items()})
        for number in range(whole, len(steps)):
            values = {name: column[number] for name, column in merged.items()}
            place = chosen[number]
            lines = {found.rank: found for found in rows.take(groups[steps[number]]).list_steps()}
            self._open[steps[number]] = _OpenStep(values, ranks[place], times[place], lines, counts[number])
        self._close_steps(MAX_OPEN)

    def _start_steps(self, first: float, count: int) -> None:
        if not self._num_steps:
            self._first_step = first
        self._num_steps += count

    def _extend_table(self, columns: Mapping[str, Sequence[float]]) -> None:
        self.num_nonfinite_losses += sum(map(math.isnan, columns.get("loss", ())))
        self.table.extend(columns)

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
        before = known.lines.get(found.rank)
        if before is not None and before.time_s == found.time_s and _have_same_values(before, found):
            return True
        is_near = _is_same_time(known, found)
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
                known.values[name] = value if math.isnan(before) else max(value, before)
            elif math.isnan(before) or (speaks and not math.isnan(value)):
                known.values[name] = value
        if speaks:
            known.rank = found.rank

    def _close_steps(self, most: int) -> None:
        while len(self._open) > most:
            step = min(self._open)
            values = self._open.pop(step).values
            self.num_nonfinite_losses += not math.isfinite(values.get("loss", 0.0))
            self.table.append(values)

    def _end_attempt(self) -> None:
        # Lines per step of an attempt that ends within its first steps.
        self._lines_per_step = max([self._lines_per_step, *(each.num_lines for each in self._open.values())])
        self._close_steps(0)
        first, last = int(self._first_step), int(self._last_step)
        self.attempts.append(LogAttempt(first_step=first, last_step=last, num_steps=self._num_steps))
        self._num_steps = 0
        self._rank_steps.clear()


def _is_same_time(known: _OpenStep, found: LogStep) -> bool | None:
    """Whether two lines about a step are printed at the same time; None if one has no time stamp."""
    if known.time_s is None or found.time_s is None:
        return None
    step_time_s = known.values.get("step_time_s", 0.0)
    limit = SAME_TIME_S + (0.5 * step_time_s if math.isfinite(step_time_s) else 0.0)
    return abs(found.time_s - known.time_s) <= limit


def _have_same_values(a: LogStep, b: LogStep) -> bool:
    names = a.values.keys() | b.values.keys()
    pairs = [(a.values.get(name, math.nan), b.values.get(name, math.nan)) for name in names]
    return all(x == y or (x != x and y != y) for x, y in pairs)

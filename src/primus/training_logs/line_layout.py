"""Numbers of many lines at once: where they stand in lines that differ in digits only.

Lines of one layout have the same length, and their numbers stand in the same columns of characters. The columns are
copied with strides into one JSON array, which takes 0.4 us a line; nothing is done for a single line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import NamedTuple

import msgspec
from msgspec import Struct

from primus.training_logs.step_reader import parse_clock
from primus.training_logs.step_rows import LogStep, RowOrigins, StepRows

MASK = bytes.maketrans(b"123456789", b"000000000")
FEWEST_ALIKE = 8
"""Fewer lines of one layout are read one by one."""


class NumberPlace(NamedTuple):
    """Where a number stands in a line; its value is `number * factor / divisor`."""

    start: int
    end: int
    factor: float = 1.0
    divisor: float = 1.0


class LineLayout(Struct, frozen=True, kw_only=True):
    """Where the values of a step stand in a line, and in each line that differs from it in digits only."""

    places: Mapping[str, NumberPlace]
    """By field of the table."""
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

    def read_rows(self, text: bytes, count: int) -> StepRows | None:
        """The steps of `count` lines with newlines between them; None if they must be read one by one."""
        if count < FEWEST_ALIKE:
            return collect_rows([self.read_line(line) for line in text.split(b"\n")])
        positions = [
            [position for position in range(place.start, place.end) if text[position] != ord(",")]
            for place in self.places.values()
        ]
        numbers = _decode_columns(text, count, positions)
        if numbers is None:
            return collect_rows([self.read_line(line) for line in text.split(b"\n")])
        columns: dict[str, list[float]] = {name: [value] * count for name, value in self.words.items()}
        for (name, place), column in zip(self.places.items(), numbers, strict=True):
            is_plain = place.factor == place.divisor == 1.0
            columns[name] = column if is_plain else [value * place.factor / place.divisor for value in column]
        if self.lacks_loss:
            if any(columns.get("num_skipped", ())):
                return None
            columns["loss"] = [math.nan] * count
        length = (len(text) + 1) // count
        return StepRows(
            columns,
            lambda places: self._find_origins([text[length * place : length * (place + 1) - 1] for place in places]),
        )

    def _find_origins(self, lines: Sequence[bytes]) -> RowOrigins:
        """Rank and time of each line."""
        rank = range(*self.rank) if self.rank else ()
        columns = [each for each in (rank, self.clock) if each]
        found = (columns and _decode_columns(b"\n".join(lines), len(lines), columns, lead=b"1")) or []
        ranks: list[int | None] = [None] * len(lines)
        times: list[float | None] = [None] * len(lines)
        if self.rank:
            ranks = [int(number) - 10 ** len(rank) for number in found[0]]
        if self.clock:
            known = {number: parse_clock(int(number) - 10 ** len(self.clock)) for number in set(found[-1])}
            times = [known[number] for number in found[-1]]
        return RowOrigins(ranks, times)


def collect_rows(steps: Sequence[LogStep]) -> StepRows:
    """Rows from steps."""
    names = dict.fromkeys(chain.from_iterable(step.values for step in steps))
    columns = {name: [step.values.get(name, math.nan) for step in steps] for name in names}
    return StepRows(
        columns,
        lambda places: RowOrigins([steps[place].rank for place in places], [steps[place].time_s for place in places]),
    )


def find_common_mask(block: bytes) -> bytes:
    """What the lines of a block have in common if they differ in digits only; else nothing."""
    length = block.find(b"\n") + 1
    count, rest = divmod(len(block) + 1, length) if length else (0, 0)
    if rest or not count or block[length - 1 :: length].count(b"\n") != count - 1:
        return b""
    masked = block.translate(MASK)
    return masked[: length - 1] if masked == (masked[:length] * count)[:-1] else b""


def group_lines(lines: Sequence[bytes]) -> Iterator[tuple[bytes, list[int], bytes]]:
    """Lines that differ in digits only: what they have in common, their places, and their text."""
    lengths = list(map(len, lines))
    for length in dict.fromkeys(lengths):
        places = [place for place, each in enumerate(lengths) if each == length]
        text = b"\n".join([lines[place] for place in places])
        masked = text.translate(MASK)
        mask = masked[:length]
        if masked == b"\n".join([mask] * len(places)):
            yield mask, places, text
            continue
        by_mask: dict[bytes, list[int]] = {}
        for place, each in zip(places, masked.split(b"\n"), strict=True):
            by_mask.setdefault(each, []).append(place)
        for mask, alike in by_mask.items():
            yield mask, alike, b"\n".join([lines[place] for place in alike])


def join_rows(parts: Sequence[tuple[Sequence[int], StepRows]]) -> StepRows:
    """One table from rows and their places among all lines."""
    if len(parts) == 1:
        return parts[0][1]
    lines = list(chain.from_iterable(places for places, _ in parts))
    order = sorted(range(len(lines)), key=lines.__getitem__)
    sort = itemgetter(*order)
    columns: dict[str, Sequence[float]] = {}
    for name in dict.fromkeys(chain.from_iterable(rows.columns for _, rows in parts)):
        columns[name] = sort(_join_columns(name, [rows for _, rows in parts]))

    def find_origins(places: Sequence[int]) -> RowOrigins:
        if len(places) == 1:
            number = order[places[0]]
            for _, rows in parts:
                if number < len(rows):
                    return rows.find_origins([number])
                number -= len(rows)
        found = [rows.find_origins(range(len(rows))) for _, rows in parts]
        ranks = list(chain.from_iterable(each.ranks for each in found))
        times = list(chain.from_iterable(each.times for each in found))
        numbers = [order[place] for place in places]
        return RowOrigins([ranks[number] for number in numbers], [times[number] for number in numbers])

    return StepRows(columns, find_origins)


def _join_columns(name: str, parts: Sequence[StepRows]) -> list[float]:
    return list(chain.from_iterable(rows.columns.get(name) or repeat(math.nan, len(rows)) for rows in parts))


_decode_floats: Callable[[bytes], list[float]] = msgspec.json.Decoder(list[float]).decode


def _decode_columns(
    text: bytes, count: int, columns: Sequence[Sequence[int]], lead: bytes = b""
) -> list[list[float]] | None:
    """Numbers that stand in columns of characters of `count` lines; None if one is not a number of JSON.

    Args:
        text: The lines, all of the same length.
        count: Number of lines.
        columns: Positions of the characters of each number.
        lead: What is written before each number: JSON has no numbers that begin with zeros.
    """
    length = (len(text) + 1) // count
    width = sum(len(positions) + len(lead) + 1 for positions in columns)
    copied = bytearray(b"," * (width * count))
    place = 0
    for positions in columns:
        if lead:
            copied[place::width] = lead * count
            place += 1
        for position in positions:
            copied[place::width] = text[position::length]
            place += 1
        place += 1
    copied[-1:] = b"]"
    try:
        numbers = _decode_floats(b"[" + copied)
    except msgspec.DecodeError:
        return None
    return [numbers[number :: len(columns)] for number in range(len(columns))]

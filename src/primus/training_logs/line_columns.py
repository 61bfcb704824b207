"""Lines of known layouts, read by column: lines of one layout have the same length, and differ in digits only.

The bytes of many lines are one array, with a row for each line and a column for each position. The bytes of a line of
the layout are subtracted, with `0` in the place of each digit. That leaves the digits of the numbers, 0 elsewhere, and
larger values in lines of other layouts. Values equal those of `float`: digits and a power of ten that are both exact
are multiplied or divided once (Clinger, PLDI 1990). Lines with other numbers are read one by one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.training_logs.line_layout import LineLayout, NumberPlace
from primus.training_logs.log_step import NO_RANK
from primus.training_logs.step_rows import NO_CLOCK, Floats, Places, StepRows, join_rows

Bytes = NDArray[np.uint8]
NEWLINE = 10
MASK = bytes.maketrans(b"123456789", b"000000000")
FEWEST_ALIKE = 8
"""Lines of one layout that are read one by one before its columns are looked for."""
MOST_MASKS = 4096
"""Most layouts that are counted; then counting starts again."""
MOST_LAYOUTS = 8
"""Most layouts of one length; the one that was found last is looked for first."""
MOST_DIGITS = 15
"""A longer number may not be exact."""
HALF = 8
"""Digits that are joined to a number of 32 bits."""
POWERS = 10.0 ** np.arange(23)
"""Powers of ten that are exact."""
NUMBER = re.compile(rb"([-+]?)([\d,]*)\.?(\d*)(?:[eE]([-+]?)(\d{1,3}))?")


class LayoutColumns:
    """The lines of a layout, and how to read them.

    Args:
        line: One of them.
        layout: Where its numbers are.

    Raises:
        ValueError: It has a number that may not be exact.
    """

    def __init__(self, line: bytes, layout: LineLayout) -> None:
        text = np.frombuffer(line, np.uint8)
        is_digit = (text - 48) <= 9
        self.layout = layout
        self._text = np.where(is_digit, np.uint8(48), text)
        self._limits = np.where(is_digit, np.uint8(9), np.uint8(0))
        # Where a line has no digit, the difference is 0: numbers get leading zeros from there.
        zero = int(np.flatnonzero(~is_digit)[0])
        self._positions: list[int] = []
        self._rank = self._place_digits(range(*layout.rank), zero) if layout.rank else slice(0)
        self._clock = self._place_digits(layout.clock, zero)
        self._decimals = {name: _Decimal(line, place) for name, place in layout.places.items()}
        for decimal in self._decimals.values():
            decimal.halves = self._place_digits(decimal.digits, zero)
            decimal.exponent_halves = self._place_digits(decimal.exponent, zero)

    def _place_digits(self, digits: Sequence[int], zero: int) -> slice:
        """Add the positions of the digits of a number; gives where its halves, of eight digits each, will be."""
        if len(digits) > MOST_DIGITS:
            raise ValueError("a number of too many digits")
        start, padding = len(self._positions) // HALF, -len(digits) % HALF
        self._positions += [zero] * padding + list(digits)
        return slice(start, len(self._positions) // HALF)

    @property
    def has_loss(self) -> bool:
        """Whether it is known that the loss is a number or not."""
        return self.layout.lacks_loss or "loss" in self.layout.places or "loss" in self.layout.words

    def has_text_of(self, other: LayoutColumns) -> bool:
        """Whether the lines of both have the same text between their digits."""
        return np.array_equal(self._text, other._text)

    def count(self, word: bytes) -> int:
        """How often a word without digits stands in each line of the layout."""
        return self._text.tobytes().count(word)

    def find(self, lines_NL: Bytes) -> tuple[NDArray[np.bool_], Bytes]:
        """Which lines have this layout, and the digits of those."""
        digits_NL = lines_NL - self._text
        is_other_NL = digits_NL > self._limits
        if not is_other_NL.any():
            return np.ones(len(lines_NL), np.bool_), digits_NL
        is_found_N = ~is_other_NL.any(axis=1)
        return is_found_N, digits_NL[is_found_N]

    def read(self, digits_NL: Bytes) -> tuple[StepRows, NDArray[np.bool_]]:
        """The steps of lines from their digits, and which of them are exact."""
        count = len(digits_NL)
        halves_HN = _join_digits(digits_NL.T[self._positions])
        columns = {name: np.full(count, value) for name, value in self.layout.words.items()}
        is_exact_N = np.ones(count, np.bool_)
        for name, decimal in self._decimals.items():
            columns[name] = decimal.compute(halves_HN, is_exact_N)
        if self.layout.lacks_loss:
            columns["loss"] = np.full(count, math.nan)
            # A step that is skipped has no loss.
            is_exact_N &= columns.get("num_skipped", np.zeros(1)) == 0
        ranks = _join_halves(halves_HN[self._rank]) if self.layout.rank else np.full(count, NO_RANK)
        clocks = _join_halves(halves_HN[self._clock]) if self.layout.clock else np.full(count, NO_CLOCK)
        return StepRows(columns, ranks.astype(np.int64), clocks.astype(np.int64)), is_exact_N


class _Decimal:
    """The digits of a number of a layout, and what stands between them."""

    def __init__(self, line: bytes, place: NumberPlace) -> None:
        found = NUMBER.fullmatch(line, place.start, place.end)
        if found is None:
            raise ValueError("not a decimal number")
        positions = [*range(*found.span(2)), *range(*found.span(3))]
        self.digits = [position for position in positions if line[position] != ord(",")]
        self.exponent = range(*found.span(5)) if found[5] else range(0)
        self.halves = self.exponent_halves = slice(0)
        self._num_decimals = len(found[3])
        self._factor = (-1.0 if found[1] == b"-" else 1.0) * place.factor
        self._divisor = place.divisor
        self._exponent_sign = -1.0 if found[4] == b"-" else 1.0

    def compute(self, halves_HN: NDArray[np.uint32], is_exact_N: NDArray[np.bool_]) -> Floats:
        """The value in each line; those that are not exact are marked."""
        values_N = _join_halves(halves_HN[self.halves])
        if self.exponent:
            exponents_N = self._exponent_sign * _join_halves(halves_HN[self.exponent_halves]) - self._num_decimals
            sizes_N = np.abs(exponents_N).astype(np.int64)
            is_exact_N &= sizes_N < len(POWERS)
            powers_N = POWERS[np.minimum(sizes_N, len(POWERS) - 1)]
            values_N = np.where(exponents_N < 0, values_N / powers_N, values_N * powers_N)
        else:
            values_N = values_N / POWERS[self._num_decimals]
        if self._factor != 1.0:
            values_N *= self._factor
        if self._divisor != 1.0:
            values_N /= self._divisor
        return values_N


def _join_digits(digits_DN: Bytes) -> NDArray[np.uint32]:
    """Numbers from eight rows of digits each: two become a number, then four, and eight."""
    twos = digits_DN[::2] * np.uint8(10) + digits_DN[1::2]
    fours = twos[::2] * np.uint16(100) + twos[1::2]
    eights: NDArray[np.uint32] = fours[::2] * np.uint32(10_000) + fours[1::2]
    return eights


def _join_halves(halves_HN: NDArray[np.uint32]) -> Floats:
    """A number from its halves: one, or the higher and the lower one."""
    values_N: Floats = halves_HN[-1].astype(np.float64)
    return values_N if len(halves_HN) == 1 else values_N + halves_HN[0] * 1e8


class ScannedBlock(NamedTuple):
    """What a block of lines says."""

    rows: StepRows | None
    lines: Places
    """Number of the line of each row, which increases."""
    others: list[tuple[int, bytes]]
    """Other lines that may be of steps, with their numbers."""
    last: tuple[LineLayout, bytes] | None
    """The last line that was read, and its layout."""
    num_lines: int


class ColumnScanner:
    """Finds the lines of steps in blocks, and learns their layouts.

    Args:
        anchor: What each line of a step contains.
        find_layout: Finds the layout of a line; None for lines that must be read one by one.
    """

    def __init__(self, anchor: bytes, find_layout: Callable[[bytes], LineLayout | None]) -> None:
        self._anchor = anchor
        self._find_layout = find_layout
        self._columns: dict[int, list[LayoutColumns]] = {}
        """Known layouts by the length of their lines."""
        self._counts: Counter[bytes] = Counter()
        """Lines that were read one by one, by what lines of a layout have in common."""
        self._refused: set[bytes] = set()

    def scan(self, block: bytes) -> ScannedBlock:
        """The steps of a block of lines."""
        found = self._scan_known(block)
        return self._scan_known(block) if self._learn([line for _, line in found.others]) else found

    def _learn(self, lines: Sequence[bytes]) -> bool:
        """Look for the layouts of lines; whether there is a new one."""
        if len(self._counts) + len(self._refused) > MOST_MASKS:
            self._counts.clear()
            self._refused.clear()
        is_new = False
        for line in lines:
            mask = line.translate(MASK)
            self._counts[mask] += 1
            if self._counts[mask] < FEWEST_ALIKE or mask in self._refused:
                continue
            layout = self._find_layout(line)
            try:
                columns = LayoutColumns(line, layout) if layout else None
            except ValueError:
                columns = None
            if columns is None or not columns.has_loss:
                self._refused.add(mask)
                continue
            del self._counts[mask]
            known = self._columns.setdefault(len(line), [])
            if not any(columns.has_text_of(each) for each in known):
                known.insert(0, columns)
                del known[MOST_LAYOUTS:]
                is_new = True
        return is_new

    def _scan_known(self, block: bytes) -> ScannedBlock:
        text = np.frombuffer(block, np.uint8)
        ends = np.append(np.flatnonzero(text == NEWLINE), len(block))
        starts = np.concatenate((np.zeros(1, np.intp), ends[:-1] + 1))
        lengths = ends - starts
        parts: list[tuple[Places, StepRows, LayoutColumns]] = []
        is_rest = np.ones(len(starts), np.bool_)
        for length in self._columns:
            lines = np.flatnonzero(lengths == length)
            if not len(lines):
                continue
            for places, rows, columns in self._scan_length(block, starts, lines, length):
                is_rest[places] = False
                parts.append((places, rows, columns))
        others = []
        # Most blocks have no anchor but in the lines that are read: then the others need not be looked at one by one.
        num_anchors = sum(columns.count(self._anchor) * len(places) for places, _, columns in parts)
        rest = np.flatnonzero(is_rest)
        if len(rest) and block.count(self._anchor) > num_anchors:
            for line, start, end in zip(rest.tolist(), starts[rest].tolist(), ends[rest].tolist(), strict=True):
                if block.find(self._anchor, start, end) >= 0:
                    others.append((line, block[start:end]))
        if not parts:
            return ScannedBlock(None, np.zeros(0, np.intp), others, None, len(starts))
        places = np.concatenate([each[0] for each in parts])
        rows = join_rows([each[1] for each in parts])
        if len(parts) > 1:
            order = np.argsort(places)
            places, rows = places[order], rows.take(order)
        last = next(columns.layout for lines, _, columns in parts if lines[-1] == places[-1])
        return ScannedBlock(rows, places, others, (last, block[starts[places[-1]] : ends[places[-1]]]), len(starts))

    def _scan_length(
        self, block: bytes, starts: Places, lines: Places, length: int
    ) -> list[tuple[Places, StepRows, LayoutColumns]]:
        """The lines of one length: their numbers, steps and layout."""
        known, parts = self._columns[length], []
        windows: Bytes = np.ndarray((len(block) - length + 1, length), np.uint8, block, strides=(1, 1))
        text_NL = windows[starts[lines]]
        for columns in list(known):
            is_found_N, digits_NL = columns.find(text_NL)
            if not len(digits_NL):
                continue
            rows, is_exact_N = columns.read(digits_NL)
            places = lines[is_found_N]
            if not is_exact_N.all():
                rows, places = rows.take(np.flatnonzero(is_exact_N)), places[is_exact_N]
            if len(places):
                parts.append((places, rows, columns))
            lines, text_NL = lines[~is_found_N], text_NL[~is_found_N]
            if not len(lines):
                break
        if parts and parts[0][2] is not known[0]:
            known.remove(parts[0][2])
            known.insert(0, parts[0][2])
        return parts

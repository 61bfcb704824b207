"""Parses the split syntax of the package `datasets`: ``train``, ``train+test``, ``train[:1%]``, ``train[-100:]``.

https://huggingface.co/docs/datasets/loading#slice-splits. Percents are rounded as in its arrow_reader.py.
"""

from __future__ import annotations

import re

from msgspec import Struct

from primus.errors import UsageError

PART = re.compile(
    r"(?P<split>\w+(?:[.-]\w+)*)"
    r"(?:\[(?P<first>-?[\d_]+%?)?:(?P<last>-?[\d_]+%?)?\])?"
    r"(?:\((?P<rounding>closest|pct1_dropremainder)\))?"
)
HINT = "as of the package datasets: train, train+test, train[:1%], train[-100:], train[:1%](pct1_dropremainder)"


class SplitPart(Struct, frozen=True, kw_only=True):
    """A split, or consecutive rows of it."""

    split: str
    """Name of the split."""
    first: int | None = None
    """First row, or percent of the rows before it. Negative values count from the end; None is the beginning."""
    last: int | None = None
    """One past the last row; None is the end."""
    is_percent: bool = False
    """Whether `first` and `last` are percents."""
    drops_remainder: bool = False
    """Whether a percent is a whole number of rows, so that equal percents have equal numbers of rows."""

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole split."""
        return self.first is None and self.last is None

    @property
    def num_first(self) -> int | None:
        """Number of rows if the part is the first rows of the split; None if it depends on the size of the split."""
        return self.end if not self.first else None

    @property
    def end(self) -> int | None:
        """One past the last row that the part may have; None if it depends on the size of the split."""
        is_known = not self.is_percent and (self.first or 0) >= 0 and self.last is not None and self.last >= 0
        return self.last if is_known else None

    def select_rows(self, num_rows: int) -> range:
        """The rows of the part in a split of `num_rows`.

        Raises:
            UsageError: One percent is less than a row.
        """
        first, last = self.first, self.last
        if self.is_percent:
            if self.drops_remainder and num_rows < 100:
                raise UsageError(
                    f"split '{self.split}': pct1_dropremainder with {num_rows} rows", "take the split without it"
                )
            first, last = (None if value is None else self._round_percent(value, num_rows) for value in (first, last))
        # Bounds beyond the split are clipped, as in a Python slice.
        begin, end = _resolve_index(first, 0, num_rows), _resolve_index(last, num_rows, num_rows)
        return range(begin, max(begin, end))

    def _round_percent(self, percent: int, num_rows: int) -> int:
        return percent * (num_rows // 100) if self.drops_remainder else round(percent * num_rows / 100)


def parse_split(text: str) -> list[SplitPart]:
    """Parse a split into its parts, in order.

    Raises:
        UsageError: The syntax is wrong, or rows are named twice.
    """
    parts = [_parse_part(text, each.strip()) for each in text.split("+")]
    for index, part in enumerate(parts):
        if any(part.split == other.split and (part.is_whole or other.is_whole) for other in parts[:index]):
            raise UsageError(f"split '{text}': rows of '{part.split}' are selected twice", "select each row once")
    return parts


def _parse_part(text: str, part: str) -> SplitPart:
    match = PART.fullmatch(part)
    if not match:
        raise UsageError(f"split '{text}': not a split: '{part}'", HINT)
    if match["split"] == "all":
        raise UsageError(f"split '{text}': 'all' is not supported", "list the splits, such as train+validation+test")
    given = [match["first"], match["last"]]
    is_percent = any(value and value.endswith("%") for value in given)
    if is_percent and any(value and not value.endswith("%") for value in given):
        raise UsageError(f"split '{text}': percent and rows in one slice", "give both ends in percent, or none")
    try:
        first, last = (None if not value else int(value.rstrip("%")) for value in given)
    except ValueError:
        raise UsageError(f"split '{text}': not a number in '{part}'", HINT) from None
    if is_percent and any(value is not None and abs(value) > 100 for value in (first, last)):
        raise UsageError(f"split '{text}': more than 100 %", "give percents from -100 to 100")
    if match["rounding"] and not is_percent:
        raise UsageError(f"split '{text}': ({match['rounding']}) without percent", "remove it")
    drops = match["rounding"] == "pct1_dropremainder"
    return SplitPart(split=match["split"], first=first, last=last, is_percent=is_percent, drops_remainder=drops)


def _resolve_index(value: int | None, default: int, num_rows: int) -> int:
    if value is None:
        return default
    return min(max(value + num_rows, 0) if value < 0 else value, num_rows)

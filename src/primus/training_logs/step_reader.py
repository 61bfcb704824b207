"""The base of all readers of logs, and the values that their lines share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import ClassVar

from primus.training_logs.step_merger import LogStep

NUMBER = re.compile(rb"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
TIME_STAMP = re.compile(rb"(\d{4})-?(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
RANK = re.compile(rb"\[(?:rank[ -]?|default|Rank )(\d+)(?:/\d+)?\]|^ *(\d+): ")
"""Ranks as torchrun (`[default7]:`), torch.distributed (`[rank7]:`), Primus (`[rank-7/8]`), DeepSpeed and
`srun --label` (`7: `) print them."""
GIB = 1 << 30


class LogLineError(ValueError):
    """A line looks like that of a step, but cannot be read: it is cut off, or mixed with another one."""


class LogEvaluation(LogStep):
    """An evaluation: the values are its step and loss."""


class StepReader:
    """Reads the lines of one format; holds state between lines, so that each file has a reader.

    Subclasses say in `ANCHORS` which bytes each of their lines contains, and read such lines in `read_line`.
    """

    NAME: ClassVar[str]
    """What `--format` takes."""
    TITLE: ClassVar[str]
    ANCHORS: ClassVar[tuple[bytes, ...]]
    """A line without any of them is not passed to `read_line`."""
    SETTING_ANCHORS: ClassVar[tuple[bytes, ...]] = ()
    """Further anchors, of lines before the first step."""
    PREFERS_LAST_RANK: ClassVar[bool] = False
    END: ClassVar[re.Pattern[bytes] | None] = None
    """How a line ends that is not cut off; None if the line does not show it."""
    MEMORY: ClassVar[str] = ""
    """What `memory_gib` is."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        """Settings of the run that the log prints."""

    @property
    def step_factor(self) -> float:
        """Steps between two records, where a log counts records instead of steps."""
        return 1.0

    @classmethod
    def recognizes(cls, line: bytes) -> bool:
        """Whether a line with an anchor is of this format, where other formats have the same anchor."""
        return True

    def read_line(self, line: bytes) -> Iterable[LogStep]:
        """The steps and evaluations that a line completes; none for other lines.

        Raises:
            LogLineError: A line of a step cannot be read.
        """
        raise NotImplementedError

    def read_columns(self, lines: Sequence[bytes]) -> Mapping[str, Sequence[float]] | None:
        """Values of many lines at once, one row for each line; None if they must be read one by one."""
        return None

    def finish(self) -> Iterable[LogStep]:
        """The step that the end of the log completes."""
        return ()


def split_steps(start: re.Pattern[bytes], line: bytes) -> Iterator[tuple[re.Match[bytes], bytes, bytes]]:
    """The steps in a line, of which there are several if ranks have written into one: match of the start, what stands
    before the first one, and the text behind the start."""
    found = list(start.finditer(line))
    for number, match in enumerate(found):
        end = found[number + 1].start() if number + 1 < len(found) else len(line)
        yield match, b"" if number else line[: match.start()], line[match.end() : end]


def parse_number(text: bytes) -> float:
    """The first number of a value: of ``a``, ``a/b``, ``a (avg b)``, ``a,bcd``, ``1.2E+03``, ``nan`` or ``inf``.

    Raises:
        LogLineError: It has none.
    """
    found = NUMBER.search(text)
    if found is None:
        raise LogLineError(text.decode(errors="replace"))
    return float(found[0].replace(b",", b""))


def parse_optional(text: bytes) -> float | None:
    """The first number of a value; None for ``N/A`` and the like."""
    return parse_number(text) if NUMBER.search(text) else None


def parse_time_stamp(text: bytes) -> float | None:
    """Seconds between an unspecified instant and a time stamp; only differences mean something."""
    found = TIME_STAMP.search(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = map(int, found.groups()[:6])
    try:
        days = date(year, month, day).toordinal()
    except ValueError:
        return None
    return days * 86400.0 + hour * 3600 + minute * 60 + second + float(b"0." + (found[7] or b"0"))


def parse_rank(text: bytes) -> int | None:
    """Rank in the prefix of a line."""
    found = RANK.search(text)
    return int(found[1] or found[2]) if found else None


def set_value(values: dict[str, float], name: str, value: float | None) -> None:
    """Set a value unless it is missing."""
    if value is not None:
        values[name] = value


def count_as_nonfinite(values: dict[str, float]) -> None:
    """Mark the loss of a step as not a finite number, where its absence from the line means that."""
    values.setdefault("loss", math.nan)

"""The base of all readers of logs, and the values that their lines share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from primus.training_logs.log_step import LogStep

if TYPE_CHECKING:
    from primus.training_logs.line_columns import ScannedBlock

NUMBER = re.compile(rb"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
THOUSANDS = re.compile(rb"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
TIME_STAMP = re.compile(rb"(\d{4})-?(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
RANK = re.compile(rb"\[(?:rank[ -]?|default|Rank )(\d+)(?:/\d+)?\]|^ *(\d+): ")
"""Ranks as torchrun (`[default7]:`), torch.distributed (`[rank7]:`), Primus (`[rank-7/8]`), DeepSpeed and
`srun --label` (`7: `) print them."""
BAR = re.compile(rb"\| *(\d+)/(\d+) \[((?:\d+:)?\d+:\d\d)<")
GIB = 1 << 30


class LogLineError(ValueError):
    """A line looks like that of a step, but cannot be read: it is cut off, or mixed with another one."""


class BarPosition(NamedTuple):
    """What a progress bar of tqdm shows."""

    step: int
    time_s: float
    """Since its start."""


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
    PRECEDENCE: ClassVar[int] = 0
    """Of several formats that read a log, the one with the highest number is taken."""
    FILE: ClassVar[str] = ""
    """Name of a file that `read_file` reads as a whole; empty if the framework writes none."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        """Settings of the run that the log prints."""

    @property
    def step_factor(self) -> float:
        """Steps between two records, where a log counts records instead of steps."""
        return 1.0

    @property
    def step_offset(self) -> float:
        """Steps before the first record, where a log counts records."""
        return 0.0

    @property
    def step_note(self) -> str:
        """What is not certain about the numbers of steps; empty if the log prints them."""
        return ""

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

    def scan_block(self, block: bytes) -> ScannedBlock | None:
        """The steps of a block of lines by column, and the lines that must be read one by one; None if all must."""
        return None

    @classmethod
    def read_file(cls, data: bytes) -> Iterable[LogStep]:
        """The steps and evaluations of a file with the name `FILE`.

        Raises:
            LogLineError: It is another file.
        """
        raise NotImplementedError

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
    check_commas(found[0])
    return float(found[0].replace(b",", b""))


def check_commas(number: bytes) -> None:
    """Check that commas separate thousands: a decimal comma would change the value by orders of magnitude.

    Raises:
        LogLineError: They do not.
    """
    if b"," in number and not THOUSANDS.fullmatch(number):
        raise LogLineError(f"{number.decode()}: a decimal comma")


def parse_optional(text: bytes) -> float | None:
    """The first number of a value; None for ``N/A`` and the like."""
    return parse_number(text) if NUMBER.search(text) else None


def parse_time_stamp(text: bytes) -> float | None:
    """Seconds between an unspecified instant and a time stamp; only differences mean something."""
    found = TIME_STAMP.search(text)
    if found is None:
        return None
    time_s = parse_clock(int(b"".join(found.groups()[:6])))
    return None if time_s is None else time_s + float(b"0." + (found[7] or b"0"))


def find_clock(text: bytes) -> list[int]:
    """Positions of the digits of a time stamp to the second, as `parse_clock` takes them."""
    found = TIME_STAMP.search(text)
    return [position for group in range(1, 7) for position in range(*found.span(group))] if found else []


def parse_clock(number: int) -> float | None:
    """Seconds between an unspecified instant and a time stamp, whose digits `YYYYMMDDhhmmss` are the number."""
    day, clock = divmod(number, 1_000_000)
    days = _count_days(day)
    return None if days is None else days * 86400.0 + clock // 10_000 * 3600 + clock // 100 % 100 * 60 + clock % 100


@lru_cache(maxsize=64)
def _count_days(day: int) -> int | None:
    try:
        return date(day // 10_000, day // 100 % 100, day % 100).toordinal()
    except ValueError:
        return None


def find_rank(text: bytes) -> tuple[int, int] | None:
    """Start and end of the number of the rank in the prefix of a line."""
    found = RANK.search(text)
    return found.span(1 if found[1] else 2) if found else None


def parse_rank(text: bytes) -> int | None:
    """Rank in the prefix of a line."""
    span = find_rank(text)
    return int(text[slice(*span)]) if span else None


def find_bar(line: bytes) -> BarPosition | None:
    """The newest progress bar of tqdm in a line."""
    found = next(reversed(list(BAR.finditer(line))), None)
    return BarPosition(int(found[1]), parse_duration(found[3])) if found else None


def parse_duration(text: bytes) -> float:
    """Seconds of `h:mm:ss` or `mm:ss`."""
    seconds = 0.0
    for part in text.split(b":"):
        seconds = 60 * seconds + int(part)
    return seconds


def set_value(values: dict[str, float], name: str, value: float | None) -> None:
    """Set a value unless it is missing."""
    if value is not None:
        values[name] = value

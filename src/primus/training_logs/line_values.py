"""Values that the lines of several formats share: numbers, time stamps, ranks and progress bars."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from primus.training_logs.log_step import parse_clock

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

"""The last uncaught Python exception of a log, and where it was raised."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from primus.diagnosis.log_line import split_rank_prefix, strip_rank_prefix

MOST_TRACEBACK_LINES = 400
"""Lines before an exception that may belong to its traceback: several ranks may write in turns."""
_NAME = r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Unsupported))"
    r"(?::\s*(?P<message>.*)|\([\"'](?P<shown>.*)[\"'],?\))?$"
)
"""A line that names an exception by the usual ends of names, also as `repr` shows it.

`Name: message` of any name counts below a traceback."""
_UNCAUGHT = re.compile(
    r"\b[Uu]ncaught (?:exception:? )?(?:<class ')?(?P<type>(?:\w+\.)*\w*(?:Error|Exception))\b(?:'>)?"
    r"(?:(?::| -->)\s*(?P<message>.*))?$"
)
"""What a program logs of an exception that ends it."""
_NATIVE = re.compile(
    r"terminate called |\s*what\(\):|F\d{4} |\[F\d* ?[\d:. ]*\S+:\d+\]|\*\*\* SIG|.*Caught signal \d"
    r"|C\+\+ exception with"
)
"""What C++ writes as it ends a process."""
_ANY_EXCEPTION = re.compile(rf"^(?P<type>{_NAME})(?::\s+(?P<message>.*))?$")
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_WRAPPED = re.compile(r"^Caught (?P<type>\w+) in (?:DataLoader worker process|replica) \d+")
"""torch raises an exception of a worker again, with the worker's traceback in the message."""
_REPORT = re.compile(
    r"(?:^|\.)(?:ChildFailedError|CalledProcessError|SignalException|ProcessRaisedException|ProcessExitedException"
    r"|SystemExit|SupervisionError|\w*ActorError|ActorDiedError|WorkerCrashedError)$"
)
"""Exceptions by which a launcher, Ray or Monarch reports that a process failed, which may have raised another one."""
_LAUNCHER = re.compile(
    r"torch/distributed/(?:run|launch|launcher/\w+|elastic/.*)\.py$|/runpy\.py$|/bin/(?:torchrun|horovodrun|accelerate|deepspeed)$"
)
"""Files of a launcher, whose traceback reports a failed process."""
CUT = "traceback without its exception"
"""Stands for the type of an exception whose traceback is cut at the end of a log."""
_MARKS = re.compile(r"[\s~^]*")
"""A line that marks the part of a source line which raised an exception."""
HANDLED = re.compile(
    r"^Exception ignored in|^--- Logging error ---|^Exception in callback |^Task exception was never retrieved"
    r"|\bException in ASGI application|\b[Uu]ncaught exception in \w+ callback"
)
"""Begins the line before the traceback of an exception after which the program goes on: one that Python could not
raise, such as one of a `__del__`, one within `logging` or a task of `asyncio`, and one of a request to a web server.
"""
HANDLED_TEXTS = ("Exception ignored in", "Logging error", "xception in ", "exception was never retrieved")
"""One of them is in each match of `HANDLED`."""
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
"""Begins the line between the traceback of an exception and that of one which it led to."""
_LIBRARY = re.compile(r"(?:site|dist)-packages/|/lib/python\d|^<|/conda/pkgs/|\.pyx$")
"""Files of installed packages, of the standard library, and of code without a file."""


class LoggedFrame(Struct, frozen=True):
    """A frame of a traceback."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to an installed package or to the standard library."""
        return _LIBRARY.search(self.file) is not None

    def format_place(self) -> str:
        """`train.py:12 in main`, with a file of a package from the package's name on."""
        file = re.split(r"(?:site|dist)-packages/|/lib/python[\d.]+/", self.file)[-1]
        function = f" in {self.function}" if self.function else ""
        return f"{file}:{self.line}{function}"


class LoggedException(Struct, frozen=True, kw_only=True):
    """An exception that a log ends with."""

    type: str
    """With its module."""
    message: str
    index: int
    """Of its line."""
    frames: tuple[LoggedFrame, ...] = ()
    """The outermost first; empty if the log has no traceback."""
    traceback: tuple[str, ...] = ()
    """Lines of the traceback without rank prefixes."""

    @property
    def is_cut(self) -> bool:
        """Whether the log ends within the traceback."""
        return self.type == CUT

    @property
    def is_report(self) -> bool:
        """Whether a launcher reports that a process failed, or the log ends while it does."""
        is_launcher = self.is_cut and self.frames != () and _LAUNCHER.search(self.frames[-1].file) is not None
        return is_launcher or _REPORT.search(self.type) is not None

    @property
    def origin(self) -> str:
        """`user code` or `library`, by the file that raised it; empty if the log has no traceback."""
        if not self.frames:
            return ""
        return "library" if self.frames[-1].is_library else "user code"

    @property
    def assertion(self) -> str:
        """The source line `assert ...` that failed; empty for other exceptions."""
        source = next((line.strip() for line in reversed(self.traceback) if not _MARKS.fullmatch(line)), "")
        return source if source.startswith("assert ") else ""

    def format_headline(self) -> str:
        """`TypeError: message`; an assertion without a message tells its expression."""
        message = self.message or self.assertion
        return f"{self.type}: {message}" if message else self.type

    def format_place(self) -> str:
        """Where it was raised, and which user code called the library that raised it."""
        if not self.frames:
            return ""
        verb = "cut at" if self.is_cut else "raised at"
        place = f"{verb} {self.frames[-1].format_place()} ({self.origin})"
        caller = next((frame for frame in reversed(self.frames) if not frame.is_library), None)
        if self.origin == "library" and caller:
            place += f", called from {caller.format_place()}"
        return place


def is_frame(body: str) -> bool:
    """Whether a line without its rank prefix is a frame of a traceback: a file and a function, which report nothing."""
    return _FRAME.match(body) is not None


def is_exception(body: str) -> bool:
    """Whether a line without its rank prefix is an exception that nothing caught, of Python or of C++."""
    return _EXCEPTION.match(body) is not None or _NATIVE.match(body) is not None or _UNCAUGHT.search(body) is not None


def find_last_exception(lines: Sequence[str]) -> LoggedException | None:
    """The last exception of `lines`, which carry no colors.

    A launcher's report of a failed process counts only without any other exception. One after which the program
    went on does not count.

    Lines carry a rank prefix such as `[rank3]:` if several ranks write into one log: frames are taken only from
    lines with the prefix of the exception.
    """
    report: LoggedException | None = None
    for index in range(len(lines) - 1, -1, -1):
        prefix, body = split_rank_prefix(lines[index])
        found = _match_exception(body, lines, index)
        if found is None:
            continue
        is_report = _REPORT.search(found["type"]) is not None
        if is_handled(lines, index) or (is_report and report):
            continue
        message = (found["message"] or found.groupdict().get("shown") or "").strip()
        message = message or _read_next_line(lines, index, prefix)
        wrapped = _WRAPPED.match(message)
        traceback = tuple(_collect_traceback(lines, index, prefix))
        exception = LoggedException(
            type=wrapped["type"] if wrapped else found["type"],
            message=message,
            index=index,
            frames=tuple(_parse_frames(traceback)),
            traceback=traceback,
        )
        if not is_report:
            return exception
        report = exception
    return report or _find_cut_traceback(lines)


def _find_cut_traceback(lines: Sequence[str]) -> LoggedException | None:
    """The traceback with which `lines` end before they tell its exception."""
    end = next((index for index in range(len(lines) - 1, -1, -1) if lines[index].strip()), -1)
    prefix, body = split_rank_prefix(lines[end]) if end >= 0 else ("", "")
    is_head = _TRACEBACK.startswith(body.strip()) and body.startswith("Traceback")
    if not body.startswith("  ") and not is_frame(body) and not is_head:
        return None
    traceback = () if is_head else tuple(_collect_traceback(lines, end + 1, prefix))
    frames = tuple(_parse_frames(traceback))
    if not is_head and not frames:
        return None
    return LoggedException(type=CUT, message="", index=end, frames=frames, traceback=traceback)


def is_handled(lines: Sequence[str], index: int) -> bool:
    """Whether the program went on after the exception at `index`: the line before its chain of tracebacks tells."""
    prefix, has_head, is_chained = split_rank_prefix(lines[index])[0], False, False
    for number in range(index - 1, max(-1, index - MOST_TRACEBACK_LINES), -1):
        line_prefix, body = split_rank_prefix(lines[number])
        if line_prefix != prefix or not body.strip():
            continue
        if body.startswith(_CHAIN):
            has_head, is_chained = False, True
        elif is_chained and not has_head:
            is_chained = False  # the exception that led to the one below
        elif has_head or not (body.startswith(" ") or _TRACEBACK in body):
            return HANDLED.search(body) is not None
        else:
            has_head = body.startswith(_TRACEBACK)
    return False


def _match_exception(body: str, lines: Sequence[str], index: int) -> re.Match[str] | None:
    """The exception that a line without its rank prefix names."""
    body = body.removeprefix("E   ").strip() if body.startswith("E   ") else body.rstrip()
    found = _EXCEPTION.match(body) or _UNCAUGHT.search(body)
    if found:
        return found
    return _ANY_EXCEPTION.match(body) if body and _follows_frame(lines, index) else None


def _follows_frame(lines: Sequence[str], index: int) -> bool:
    """Whether the line before is a frame's source line, so that an unindented line names the exception."""
    before = [strip_rank_prefix(line) for line in lines[max(0, index - 4) : index]]
    return bool(before) and before[-1].startswith("    ") and any(_FRAME.match(line) for line in before)


def _read_next_line(lines: Sequence[str], index: int, prefix: str) -> str:
    """The message of an exception whose line ends with its type and a colon."""
    if index + 1 < len(lines) and lines[index].rstrip().endswith(":"):
        next_prefix, body = split_rank_prefix(lines[index + 1])
        return body.strip() if next_prefix == prefix else ""
    return ""


def _collect_traceback(lines: Sequence[str], index: int, prefix: str) -> list[str]:
    """Lines of the same rank above the exception, up to the head of its traceback."""
    traceback: list[str] = []
    for number in range(index - 1, max(-1, index - MOST_TRACEBACK_LINES), -1):
        line_prefix, body = split_rank_prefix(lines[number])
        if line_prefix != prefix:
            continue
        body = body.removeprefix("E ")
        if _TRACEBACK in body or _EXCEPTION.match(body):  # an earlier exception: this traceback has no head
            break
        traceback.append(body)
    return traceback[::-1]


def _parse_frames(traceback: Sequence[str]) -> Iterator[LoggedFrame]:
    for line in traceback:
        found = _FRAME.match(line)
        if found:
            yield LoggedFrame(found["file"], int(found["line"]), found["function"] or "")

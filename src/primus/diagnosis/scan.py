"""Lines of logs that show signatures.

Most lines of a log differ from others only in their digits. Without digits a window is a small set of shapes, and each
shape is compared with the signatures once, for all ranks. Logs with many unlike lines are searched in two stages: the
set of their words decides which of the signatures' texts can occur at all, and only those are searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from primus.diagnosis import log_line as lines_of
from primus.diagnosis.line_shapes import (
    DIGITS,
    ROOT_CAUSE,
    UNINTERESTING,
    LineShape,
    find_meaningful_shapes,
    index_patterns,
    is_progress,
    shows_not_finite,
)
from primus.diagnosis.logs import LONGEST_LINE, LogContent, LogFile, LogWindow
from primus.diagnosis.python_exception import HANDLED, HANDLED_TEXTS, is_exception, is_handled
from primus.diagnosis.signature import Signature, SignatureTable
from primus.diagnosis.signature_files import get_signature_table

MOST_HITS = 4096
"""Limit for one shape in one window."""
MOST_SHAPES = 100_000
MOST_INDENT = 12
"""Spaces before the frames of an indented traceback that tells how a program ended."""
SOURCE_DISTANCE = 3
"""Lines between a frame of a traceback and its source, if several ranks write into one log."""
LAST_LINES = 8
"""An error among the last ones may be what ended the program."""
WARNING_LINES = 2
"""A warning and its source line: a program that writes more goes on."""
SHORTEST_START = 12
"""Characters of a first line by which a new run is recognized."""
ENDING_MESSAGES = 60
"""Messages that others may still write after a process ended: other ranks, the launcher, a script."""
OWN_MESSAGES = 8
"""Messages that a process of Ray may still write after the exception that ends it."""
ENDING_LINES = 20_000
"""Lines of which such messages are searched, as each rank may write its stacks."""
FROM_PARENT = b".load(from_parent)"
"""Where multiprocessing raises an exception in a child whose parent ended while it started it."""
_HANDLED_TEXTS = tuple(text.encode() for text in HANDLED_TEXTS)
TRACEBACK_HEAD = b"Traceback (most recent call last)"
FIELDS_ABOVE = 4
"""Lines of torchrun's report of a failed rank above one of its fields."""
LOOK_BACK = 200
"""Lines before a hit in which a time, or the head of a traceback, is looked for."""

_EXIT_CODE = re.compile(
    r"(?i)\b(?:(?:exit|exited with|exits with return|return)[ _]?code|(?:exit|exited with) status)\b"
    r"\"?(?: (?:was|is|of))?\s*[:=]?\s*\(?(-?\d{1,3})\b"
)
_STEP_NUMBER = re.compile(
    r"(?i)(?:iteration|step|epoch(?:\(\w+\))?|batch)\D{0,12}([\d.]+(?:\D{1,5}\d+\b)?)|(\d+)/\d+ ?[\[\]]"
)
_RETRY = re.compile(
    r"(?i)\battempt (\d+) ?(?:of|/) ?(\d+)|\bretry(?:ing)? (?:in|after) |\bwill (?:be )?retr(?:y|ied)|, retrying\b"
    r"|\bgoing to \S+ instead|\bfall(?:ing|s)? back (?:to|on)\b|\bignor(?:e|ing) (?:\w+ )?errors?\b"
)
"""The program tries again or another way, and reports it if it gives up."""
STEPS_OF_OTHERS = 3
"""Steps after a line that show it did no harm if several ranks write: other ranks may report a step or two that were
over before they began to wait for the rank that failed."""

_JOB_END = re.compile(rb"slurmstepd: error: \*\*\* JOB (\d+) ON ")
_LAUNCHER_START = b"Setting OMP_NUM_THREADS environment variable for each process"
_RUN_TEXTS = (_LAUNCHER_START, b"*** JOB ")
_ATTEMPT_MARK = re.compile(rb"\battempt (\d{1,6}) (?:on|begins in|starts in) ")


class SignatureHit(Struct, frozen=True, kw_only=True):
    """A line that shows a signature."""

    signature: Signature
    log: LogFile
    offset: int
    """Bytes of the log before the window."""
    index: int
    """Of the line in the window."""
    text: str
    """Without colors."""
    around: int = 0
    """Character at which the pattern matches."""
    rank: int | None = None
    local_rank: int | None = None
    """Rank within its node."""
    host: str | None = None
    time: float | None = None
    is_warning: bool = False
    """Whether the line's level says that the program goes on."""
    is_last: bool = False
    """Whether hardly any line follows."""
    is_end: bool = False
    """Whether the line shows that a process ended: an exception, or a report of a launcher, a scheduler or the kernel,
    after which the log soon ends."""
    is_own_time: bool = False
    """Whether the time is of the line itself, not of one before it."""
    survived: bool = False
    """Whether training continued after it."""
    is_doubtful: bool = False
    """Whether a step or two followed, perhaps of other ranks."""


class RootCauseBlock(Struct, frozen=True, kw_only=True):
    """torchrun's report of the first failure that it observed."""

    log: LogFile
    offset: int
    index: int
    rank: int | None = None
    host: str | None = None
    time: float | None = None
    exit_code: int | None = None


class LogScan(Struct, kw_only=True):
    """What one log shows."""

    log: LogFile
    note: str = ""
    """Which part of it was not read."""
    mtime: float = 0.0
    hits: list[SignatureHit] = []
    blocks: list[RootCauseBlock] = []
    world_size: int = 0
    """Ranks of the job; 0 if the log does not say."""
    has_steps: bool = False
    """Whether it reports steps."""
    last_step: float | None = None
    """When it reports the last one, if it tells."""
    ends_in_traceback: bool = False
    """Whether a traceback is among its last messages, whatever its exception is."""


_WORLD_SIZE = re.compile(rb"\b(?:n[Rr]anks|NRANKS|[Ww]orld[_ ][Ss]ize|WORLD[_ ]SIZE)\W{1,4}(\d{1,7})\b")
_WORLD_SIZE_TEXTS = (b"Ranks", b"ranks", b"RANKS", b"orld", b"ORLD")
"""One of them is in each match of `_WORLD_SIZE`; the search for them is many times faster."""


class LogEnd(Struct, frozen=True):
    """Where the end of a log begins."""

    index: int
    """Of the line from which only a few messages follow."""
    by_process: dict[str, int]
    """The line from which a process of Ray, by its prefix, still writes several messages: it had not ended before."""

    def holds(self, index: int, text: str) -> bool:
        """Whether a process may have ended with the line `text`."""
        return index >= self.index and index >= self.by_process.get(lines_of.split_rank_prefix(text)[0], 0)


class LogScanner:
    """Scans logs, and remembers the shapes of their lines."""

    def __init__(self) -> None:
        self._table = get_signature_table()
        self._index = index_patterns(self._table)
        self._shapes: dict[bytes, LineShape] = {}

    def scan_log(self, log: LogFile, content: LogContent) -> LogScan:
        """Everything that the content of `log` shows."""
        scan = LogScan(log=log, note=content.note, mtime=content.mtime)
        for window in content.windows:
            self._scan_window(scan, window, is_end=window is content.windows[-1])
        return scan

    def _scan_window(self, scan: LogScan, window: LogWindow, is_end: bool) -> None:
        shapes = window.data.translate(None, DIGITS).split(b"\n")
        here = set(shapes)
        self._classify_shapes([shape for shape in here if shape not in self._shapes])
        found = {shape: self._shapes[shape] for shape in here}
        interesting = {shape: each for shape, each in found.items() if not each.is_uninteresting}
        if interesting:
            progress = {shape: each.is_done for shape, each in found.items() if each.is_progress}
            survived = _find_progress(scan.log, window, shapes, progress)
            if survived[1] >= 0:
                scan.has_steps, scan.last_step = True, _find_earlier_time(window, survived[1] + 1, scan.mtime)
            ending = find_ending(window) if is_end else LogEnd(len(window.lines), {})
            scan.ends_in_traceback = _has_traceback(window.lines, max(ending.index, survived[1] + 1), ending)
            _collect_hits(scan, window, shapes, interesting, survived, ending, self._table)
            scan.world_size = max(scan.world_size, _find_world_size(window.data))

    def _classify_shapes(self, unknown: list[bytes]) -> None:
        if len(self._shapes) > MOST_SHAPES:
            self._shapes.clear()
        self._shapes.update(dict.fromkeys(unknown, UNINTERESTING))
        self._shapes.update(find_meaningful_shapes(unknown, self._index))


def _find_world_size(data: bytes) -> int:
    """Ranks of the job, as `data` says first; 0 if it does not say."""
    found = _WORLD_SIZE.search(data) if any(text in data for text in _WORLD_SIZE_TEXTS) else None
    return int(found[1]) if found else 0


def _find_progress(log: LogFile, window: LogWindow, shapes: list[bytes], wanted: dict[bytes, bool]) -> tuple[int, int]:
    """Indices of the lines before which nothing was fatal, and probably nothing was, as training continued; else -1.

    Args:
        log: The log.
        window: The part of it.
        shapes: Its lines without digits.
        wanted: Shapes that report a step, with whether they report the end of the training.
    """
    steps: set[str] = set()
    last = -1
    for index in range(len(shapes) - 1, -1, -1) if wanted else ():
        if shapes[index] in wanted:
            if wanted[shapes[index]]:
                return index, max(last, index)
            number = _STEP_NUMBER.search(lines_of.decode_plain_text(window.lines[index]))
            steps.add(number[0] if number else "")
            last = max(last, index)
            if log.rank is not None or len(steps) == STEPS_OF_OTHERS:
                return index, last
    return -1, last


def _collect_hits(
    scan: LogScan,
    window: LogWindow,
    shapes: list[bytes],
    interesting: dict[bytes, LineShape],
    survived: tuple[int, int],
    ending: LogEnd,
    table: SignatureTable,
) -> None:
    counts: dict[bytes, int] = {}
    span = _find_attempt_span(scan.log, window, interesting)
    for index, shape in enumerate(shapes):
        found = interesting.get(shape)
        if found is None or not span[0] <= index < span[1]:
            continue
        counts[shape] = counts.get(shape, 0) + 1
        if counts[shape] > MOST_HITS:
            continue
        if found.is_block:
            scan.blocks.append(_parse_root_cause_block(scan.log, window, index, scan.mtime))
        scan.hits.extend(_find_hits(scan, window, index, found, survived, ending, table))


def _has_traceback(lines: Sequence[bytes], begin: int, ending: LogEnd) -> bool:
    """Whether a line from `begin` on is the head of a traceback that Python did not ignore and that ended a process."""
    heads = (index for index in range(begin, len(lines)) if TRACEBACK_HEAD in lines[index])
    fatal = (index for index in heads if ending.holds(index, lines_of.decode_plain_text(lines[index])))
    return any(index == 0 or not HANDLED.search(lines_of.decode_plain_text(lines[index - 1])) for index in fatal)


def find_ending(window: LogWindow) -> LogEnd:
    """The lines from which only a few messages follow, besides frames of stacks and traces of NCCL."""
    num_messages: dict[str, int] = {}
    by_process: dict[str, int] = {}
    first = max(0, len(window.lines) - ENDING_LINES)
    for index in range(len(window.lines) - 1, first - 1, -1):
        prefix, body = lines_of.split_rank_prefix(lines_of.decode_plain_text(window.lines[index]))
        if not body or body.startswith((" ", "\t", "frame #", "Traceback")) or lines_of.is_info(body):
            continue
        for writer in {"", prefix} if "pid=" in prefix else {""}:
            num_messages[writer] = num_messages.get(writer, 0) + 1
        if "pid=" in prefix and num_messages[prefix] > OWN_MESSAGES:
            by_process.setdefault(prefix, index)
        if num_messages.get("", 0) > ENDING_MESSAGES:
            return LogEnd(index, by_process)
    return LogEnd(first, by_process)


def _find_attempt_span(log: LogFile, window: LogWindow, interesting: Mapping[bytes, LineShape]) -> tuple[int, int]:
    """Lines of the window that belong to the log's attempt, else to the last run that the log reports."""
    if log.attempt is None:
        return _find_last_run(window, interesting), len(window.lines)
    marked = ((index, _ATTEMPT_MARK.search(text)) for index, text in enumerate(window.lines) if b"attempt " in text)
    numbered = {int(found[1]): index for index, found in marked if found}
    begin = numbered.get(log.attempt, 0)
    later = [index for number, index in numbered.items() if number > log.attempt and index > begin]
    return begin, min(later, default=len(window.lines))


def _find_last_run(window: LogWindow, interesting: Mapping[bytes, LineShape]) -> int:
    """Index of the line at which the last of several runs begins that were appended to one log.

    A run ends with torchrun's report before torchrun starts again, as a Slurm job before another job ends, or with an
    exception before the first line of the log returns.
    """
    begin, last, job, has_ended = 0, 0, b"", False
    for index, text in enumerate(window.lines) if any(each in window.data for each in _RUN_TEXTS) else ():
        if ended := _JOB_END.search(text):
            begin, job = (last + 1 if job and job != ended[1] else begin), ended[1]
            last = index
        elif ROOT_CAUSE in text:
            has_ended = True
        elif has_ended and _LAUNCHER_START in text:
            begin, has_ended = index, False
    return max(begin, _find_last_start(window, interesting))


def _find_last_start(window: LogWindow, interesting: Mapping[bytes, LineShape]) -> int:
    """Index of the line at which the last of several runs begins that begin alike, after an exception; else 0.

    A last run of a few lines, without an exception, has just begun: the one before it counts.
    """
    first = next((index for index, raw in enumerate(window.lines) if raw.strip()), 0)
    start = window.lines[first].translate(None, DIGITS)
    is_start = len(start) >= SHORTEST_START and TRACEBACK_HEAD not in start and _LAUNCHER_START not in start
    text = lines_of.decode_plain_text(window.lines[first])
    shape = interesting.get(start, UNINTERESTING)
    is_report = any(signature.matches(text) for _, signature in shape.patterns)
    is_report |= shape.may_exit and _EXIT_CODE.search(text) is not None
    if not is_start or is_report or is_progress(window.lines[first]):
        return 0
    is_ended = False
    for index in range(len(window.lines) - 1, first, -1):
        raw = window.lines[index]
        is_run = is_ended or len(window.lines) - index > LAST_LINES
        if is_run and len(raw) >= SHORTEST_START and raw.translate(None, DIGITS) == start:
            above = [each for each in window.lines[max(0, index - LAST_LINES) : index] if each.strip()]
            if any(map(_ends_run, above)):
                return index
        is_ended = is_ended or _ends_run(raw)
    return 0


def _ends_run(raw: bytes) -> bool:
    return b"Error" in raw and is_exception(lines_of.strip_rank_prefix(lines_of.decode_plain_text(raw)))


def _find_hits(
    scan: LogScan,
    window: LogWindow,
    index: int,
    shape: LineShape,
    survived: tuple[int, int],
    ending: LogEnd,
    table: SignatureTable,
) -> Iterator[SignatureHit]:
    raw = window.lines[index]
    for piece in raw.split(b"\r") if b"\r" in raw else (raw,):
        text = lines_of.decode_plain_text(piece if len(piece) <= LONGEST_LINE else _cut_around_pattern(piece, shape))
        found = dict(_match_signatures(text, shape, table))
        if not found or _is_source(window, index, text):
            continue
        is_harmless = lines_of.is_info(text) or _is_harmless_exception(window, index, text)
        is_calm = lines_of.has_low_level(text) and not shows_not_finite(raw)
        for signature, around in found.values():
            if signature.role == "root" and (is_harmless or (is_calm and not signature.shows_end)):
                continue  # a program that goes on says what it lacks
            yield _build_hit(scan, window, index, signature, text, around, survived, ending)


def _cut_around_pattern(piece: bytes, shape: LineShape) -> bytes:
    """The part of a very long line that holds a pattern."""
    at = max((piece.find(pattern.text.encode()) for pattern, _ in shape.patterns), default=0)
    return piece[max(0, at - LONGEST_LINE // 2) : max(0, at) + LONGEST_LINE // 2]


def _match_signatures(
    text: str, shape: LineShape, table: SignatureTable
) -> Iterator[tuple[str, tuple[Signature, int]]]:
    """Signatures that the line shows, by name, with the character at which it does."""
    has_match = False
    for pattern, signature in shape.patterns:
        if pattern.matches(text):
            has_match = True
            yield signature.name, (signature, text.find(pattern.text))
    if not has_match and shape.may_exit:
        code = _EXIT_CODE.search(text)
        known = table.by_exit_code.get(int(code[1])) if code else None
        if known and code:
            yield known.name, (known, code.start())


def _is_source(window: LogWindow, index: int, text: str) -> bool:
    """Whether the line is the source line of a traceback's frame, which quotes messages that were not printed."""
    body = lines_of.strip_rank_prefix(text)
    if not body.startswith("    "):
        return False
    before = window.lines[max(0, index - SOURCE_DISTANCE) : index]
    frames = [each for each in before if b'  File "' in each and b", line " in each]
    # `pip` indents whole tracebacks: the exception is indented less than the frames above it. Loggers with columns
    # indent a traceback further, that of a warning too.
    indent = _measure_indent(frames[-1]) if frames else -1
    return indent > MOST_INDENT or 0 <= indent < len(body) - len(body.lstrip())


def _measure_indent(frame: bytes) -> int:
    body = lines_of.strip_rank_prefix(lines_of.decode_plain_text(frame))
    return len(body) - len(body.lstrip())


def _is_harmless_exception(window: LogWindow, index: int, text: str) -> bool:
    """Whether the line is an exception after which the program went on, or that tells of the end of a parent."""
    above = window.lines[max(0, index - LOOK_BACK) : index]
    if not is_exception(lines_of.strip_rank_prefix(text)):
        return False
    if above and FROM_PARENT in above[-1]:
        return True
    if not any(each in raw for raw in above for each in _HANDLED_TEXTS):
        return False
    lines = [*map(lines_of.decode_plain_text, above), text]
    return is_handled(lines, len(above))


def _build_hit(
    scan: LogScan,
    window: LogWindow,
    index: int,
    signature: Signature,
    text: str,
    around: int,
    survived: tuple[int, int],
    ending: LogEnd,
) -> SignatureHit:
    log, near = scan.log, scan.mtime
    own = _find_kernel_time(window, text, near) if log.is_kernel else lines_of.find_time(text, near)
    time = own if own is not None else _find_earlier_time(window, index, near)
    rank, local_rank = _find_ranks(window, index, text, log)
    report = _read_report(window.lines[max(0, index - FIELDS_ABOVE) : index + 1]) if is_block_field(text) else {}
    host = lines_of.find_host(text) or _get_reported_host(report) or log.host
    is_warning = lines_of.is_warning(text) or lines_of.is_info(text)
    num_last = WARNING_LINES if is_warning and signature.role == "root" else LAST_LINES
    is_last = index >= ending.index and not any(map(bytes.strip, window.lines[index + num_last :][:LAST_LINES]))
    still_retries = is_last and signature.role == "symptom"
    return SignatureHit(
        signature=signature,
        log=log,
        offset=window.offset,
        index=index,
        text=text,
        around=around,
        rank=rank if rank is not None else _parse_int(report.get("rank")),
        local_rank=local_rank,
        host=host or (_find_pod_above(window, index) if lines_of.is_pod_event(text) else None),
        is_warning=is_warning,
        is_last=is_last and not lines_of.is_info(text),
        is_end=(log.is_kernel or ending.holds(index, text))
        and (signature.shows_end or is_exception(lines_of.strip_rank_prefix(text))),
        time=time if time is not None else log.time,
        is_own_time=own is not None or (time is None and log.time is not None),
        survived=index < survived[0] or (_is_retried(text) and not still_retries),
        is_doubtful=index < survived[1],
    )


def _find_ranks(window: LogWindow, index: int, text: str, log: LogFile) -> tuple[int | None, int | None]:
    """Rank and local rank that a line names; for an exception without them, that of its traceback's head."""
    rank = log.rank if log.rank is not None else lines_of.find_rank(text, log.local_to_rank is None)
    local_rank = lines_of.find_local_rank(text)
    if rank is None and local_rank is None and not text.startswith(" ") and window.lines[index - 1].startswith(b"  "):
        head = next((raw for raw in reversed(window.lines[max(0, index - LOOK_BACK) : index]) if raw[:2] != b"  "), b"")
        if TRACEBACK_HEAD in head:
            rank = lines_of.find_rank(lines_of.decode_plain_text(head))
    if rank is None and local_rank is not None and log.local_to_rank is not None:
        rank = local_rank + log.local_to_rank
    return rank, local_rank


def _find_pod_above(window: LogWindow, index: int) -> str | None:
    """The pod that `kubectl` names above one of its events or states: in a table, or in the pod's description."""
    above = (lines_of.decode_plain_text(raw) for raw in reversed(window.lines[max(0, index - LOOK_BACK) : index]))
    return next((pod for text in above if (pod := lines_of.find_pod(text))), None)


def _is_retried(text: str) -> bool:
    found = _RETRY.search(text)
    return found is not None and (found[1] is None or int(found[1]) < int(found[2]))


_KERNEL_TIMESTAMP = re.compile(rb"^\[ *(\d+\.\d+)\]")


def _find_kernel_time(window: LogWindow, text: str, written: float) -> float | None:
    """The latest time at which the kernel can have written a line: its clock starts at boot."""
    stamp = _KERNEL_TIMESTAMP.search(text.encode())
    last = next((found for raw in reversed(window.lines) if (found := _KERNEL_TIMESTAMP.search(raw))), None)
    return written - float(last[1]) + float(stamp[1]) if stamp and last and written else None


def _find_earlier_time(window: LogWindow, index: int, near: float) -> float | None:
    for earlier in range(index - 1, max(-1, index - LOOK_BACK), -1):
        text = window.lines[earlier]
        if b":" in text:
            time = lines_of.find_time(text[:400].decode("utf-8", "replace"), near)
            if time is not None:
                return time
    return None


_FIELD = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: (\S+)")


def is_block_field(text: str) -> bool:
    """Whether a line is a field of torchrun's report of failed ranks."""
    return _FIELD.search(lines_of.strip_rank_prefix(text)) is not None


def _read_report(lines: Sequence[bytes]) -> dict[str, str]:
    """The fields of torchrun's report of a failed rank."""
    fields: dict[str, str] = {}
    for raw in lines:
        found = _FIELD.search(lines_of.strip_rank_prefix(lines_of.decode_plain_text(raw)))
        if found:
            fields.setdefault(found[1], found[2])
    return fields


def _get_reported_host(report: dict[str, str]) -> str | None:
    host = report.get("host")
    return None if host == "localhost" else host  # every node's name for itself


def _parse_root_cause_block(log: LogFile, window: LogWindow, index: int, near: float) -> RootCauseBlock:
    """The report after torchrun's head line."""
    fields = _read_report(window.lines[index + 1 : index + 10])
    return RootCauseBlock(
        log=log,
        offset=window.offset,
        index=index,
        rank=_parse_int(fields.get("rank")),
        host=_get_reported_host(fields),
        time=lines_of.find_time(fields.get("time", ""), near),
        exit_code=_parse_int(fields.get("exitcode")),
    )


def _parse_int(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None

"""Diagnoses an attempt by its logs: reads and scans them, ranks the causes, and falls back to the last exception."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus.diagnosis import kernel_log, log_line, log_sources, logs, python_exception, run_evidence
from primus.diagnosis.cause_ranking import ERROR_SUFFIX, REASON_DISTANCE, rank_causes
from primus.diagnosis.finding import Cause, Diagnosis, Evidence
from primus.diagnosis.line_shapes import is_progress, is_quoted
from primus.diagnosis.logs import LogContent, LogFile
from primus.diagnosis.python_exception import LoggedException
from primus.diagnosis.run_evidence import RunEvidence
from primus.diagnosis.scan import LogScan, LogScanner, find_ending
from primus.diagnosis.signature import UNCAUGHT_EXCEPTION, Signature
from primus.diagnosis.signature_files import get_signature_table
from primus.errors import PrimusError, UsageError
from primus.runs.store import Run

__all__ = ["ERROR_SUFFIX", "Cause", "Diagnosis", "Evidence", "diagnose_logs", "diagnose_run"]

QUICK_BYTES = 32 * 1024 * 1024
"""Read at a failure, while a job waits for the decision."""
THOROUGH_BYTES = 1024 * 1024 * 1024
"""Read when a user asks."""
NUM_READERS = 8
MANY_LOGS = 16
NUM_TAIL = 20
NUM_UNKNOWN = 2000
"""Last lines in which an exception is searched."""
NUM_INNERMOST = 6
"""Lines of a traceback, two for each frame, that tell whose connection failed if the exception's words do not."""
NUM_FATAL = 50
"""Last lines in which a fatal error without an exception is searched."""
NUM_TAILS = 512
"""Logs whose end is read if no signature matches: enough to include the rank that failed first, few enough for a slow
file system."""
KERNEL_S = 3600.0
"""Time before the last change of the logs within which kernel messages count."""
LAUNCHER_REPORT = "worker-group-failed"
"""The signature of launchers' lines that name a failed rank."""
KILLS = ("killed", "died-silently")
"""Signatures after which the kernel log is read: the kernel may have killed the process for memory."""
CODE_ERRORS = ("IndexError", "KeyError", "NameError", "UnboundLocalError", "ZeroDivisionError", "RecursionError")
"""Exceptions of a program's code: their words are names and numbers, which say nothing of the cause."""
_GOES_ON = re.compile(r"\b(?:will|won't|would) (?:not )?be (?:exported|ignored|skipped|disabled)\b")
"""An error that says what the program goes on without."""
_KEY = re.compile(r"['\"]\w+['\"]: ")
"""A key of a printed dictionary, whose name says nothing of the cause."""
_FATAL = re.compile(
    r"\b(?:FATAL|PANIC)\b|^(?:\S+ \S+: )?F \S+:\d+\]|^F\d{4} \d\d:|^(?:fatal|panic): |\(core dumped\)|^Aborted\b"
    r"|terminate called after|\bCheck failed: "
)
"""Texts by which programs without exceptions report a fatal error."""
_ERROR = re.compile(
    r"^[^'\"]{0,60}\b(?:ERROR|CRITICAL)\b|^(?:(?!slurm)\S+: )?(?:[Ee]rror|fatal|panic): (?![\d.])"
    r"|\blevel=(?:error|fatal)\b|^ ?[EC] \d+ \d+\] |^E\d{4} "
    r"|\b[Ff]ailed\b(?! ?[:=]? ?\d)|\b[Ee]rror (?:from|reported|in)\b|\baborting\b"
)
"""What tells that the last line of a log is an error: its level, its first word, or that something failed.

slurmstepd reports as an error what a node lacks."""


def diagnose_run(
    run: Run,
    attempt: int | None = None,
    *,
    budget_bytes: int = QUICK_BYTES,
    kernel: bool | None = None,
    extra_logs: Sequence[Path] = (),
) -> Diagnosis:
    """Diagnose an attempt of `run`.

    Args:
        run: The run folder.
        attempt: The newest one by default.
        budget_bytes: Limit for all logs together.
        kernel: Whether to read the kernel log of this node; None reads it if a process was killed and nothing says why.
        extra_logs: Logs of the run outside its folder.
    """
    number = log_sources.find_newest_attempt(run) if attempt is None else attempt
    evidence = run_evidence.collect_run_evidence(run, number)
    began = log_sources.read_attempt_begin(run, number)
    since = log_sources.find_attempt_start(number, began)
    outside = [LogFile(name=str(path), path=path, attempt=number, since=since) for path in extra_logs]
    recorded = [] if evidence.failures else log_sources.read_recorded_reason(run, number)
    everything = [*log_sources.find_attempt_logs(run, number, began), *outside, *evidence.logs, *recorded]
    first = {failure.rank for failure in evidence.failures[:1]}
    scans, notes = _scan_logs(everything, budget_bytes, first)

    def seen_before(name: str) -> bool:
        if number == 0:
            return False
        before = diagnose_run(run, number - 1, budget_bytes=QUICK_BYTES, kernel=False).cause
        return before is not None and before.signature == name

    diagnosis = rank_causes(scans, evidence, seen_before)
    top = diagnosis.cause
    if kernel or (kernel is None and top is not None and top.signature in KILLS):
        found, note = _scan_kernel_log(began)
        notes += [note] if note else []
        diagnosis = rank_causes([*scans, *found], evidence, seen_before)
    if diagnosis.cause is None or not diagnosis.cause.is_proven:
        diagnosis = _add_log_ending(diagnosis, evidence, everything, is_failure=True)
        if not diagnosis.reason and recorded:
            diagnosis = structs.replace(diagnosis, reason=log_line.shorten_line((recorded[0].data or b"").decode()))
    diagnosis = _place_lead(diagnosis)
    return structs.replace(diagnosis, notes=(*notes, *diagnosis.notes))


def diagnose_logs(
    paths: Sequence[Path], *, budget_bytes: int = THOROUGH_BYTES, kernel: bool = False, texts: Sequence[LogFile] = ()
) -> Diagnosis:
    """Diagnose logs that belong to no run folder, such as those of a scheduler or another launcher.

    Args:
        paths: Files, or folders of files.
        budget_bytes: Limit for all logs together.
        kernel: Whether to read the kernel log of this node.
        texts: Logs that are not files.

    Raises:
        UsageError: No log is found.
        PrimusError: None can be read.
    """
    files = [file for path in paths for file in (log_sources.find_folder_logs(path) if path.is_dir() else [path])]
    everything = [
        *texts,
        *(LogFile(name=str(file), path=file, rank=logs.parse_rank_of_path(file), local_to_rank=None) for file in files),
    ]
    if not everything:
        raise UsageError(
            f"no logs in {', '.join(map(str, paths))}", f"logs end with {', '.join(log_sources.LOG_SUFFIXES)}"
        )
    scans, notes = _scan_logs(everything, budget_bytes, set())
    if not scans:
        raise PrimusError(notes[-1], "give a log, a run folder, or a folder of logs")
    if kernel:
        newest = max((scan.mtime for scan in scans if scan.mtime), default=time.time())
        found, note = _scan_kernel_log(newest - KERNEL_S)
        scans, notes = [*scans, *found], notes + ([note] if note else [])
    diagnosis = rank_causes(scans, RunEvidence(), lambda name: False)
    if diagnosis.cause is None or not diagnosis.cause.is_proven:
        is_failure = diagnosis.first_rank is not None
        diagnosis = _add_log_ending(diagnosis, RunEvidence(), everything, is_failure=is_failure)
    diagnosis = _place_lead(diagnosis)
    return structs.replace(diagnosis, notes=(*notes, *diagnosis.notes))


def _scan_logs(everything: Sequence[LogFile], budget_bytes: int, first: set[int]) -> tuple[list[LogScan], list[str]]:
    """What each log shows, and notes on those that could not be read."""
    limit = logs.compute_read_limit(budget_bytes, len(everything))
    problem = get_signature_table().problem.partition("\n")[0]
    scanner, scans, notes = LogScanner(), [], [problem] if problem else []
    for log, content in _read_contents(everything, limit, first):
        if isinstance(content, PrimusError):
            notes.append(content.problem)
        else:
            scans.append(scanner.scan_log(log, content))
    return scans, notes


def _read_contents(
    everything: Sequence[LogFile], limit: int, first: set[int]
) -> Iterator[tuple[LogFile, LogContent | PrimusError]]:
    """Every log with its content. Many logs are read in parallel, a few ahead, as file systems may be slow."""

    def content(log: LogFile) -> LogContent | PrimusError:
        try:
            return logs.read_log(log, min(logs.LARGEST, 8 * limit) if log.rank in first else limit)
        except PrimusError as error:
            return error

    if len(everything) < MANY_LOGS:
        yield from ((log, content(log)) for log in everything)
        return
    yield from _read_ahead(content, everything)


def _read_ahead(
    content: Callable[[LogFile], LogContent | PrimusError], everything: Sequence[LogFile]
) -> Iterator[tuple[LogFile, LogContent | PrimusError]]:
    from collections import deque
    from concurrent.futures import Future, ThreadPoolExecutor

    with ThreadPoolExecutor(NUM_READERS) as pool:
        waiting: deque[tuple[LogFile, Future[LogContent | PrimusError]]] = deque()
        for log in everything:
            waiting.append((log, pool.submit(content, log)))
            if len(waiting) >= 2 * NUM_READERS:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _scan_kernel_log(began: float | None) -> tuple[list[LogScan], str]:
    data, problem = kernel_log.read_kernel_log(began)
    if problem or not data:
        return [], problem
    log = LogFile(name="kernel log", data=data, host=socket.gethostname(), is_kernel=True)
    return [LogScanner().scan_log(log, logs.read_log(log, len(data)))], ""


class _LogEnding(Struct, frozen=True, kw_only=True):
    """The end of a log after the last step that it reports."""

    log: LogFile
    lines: tuple[str, ...] = ()
    exception: LoggedException | None = None
    line_number: int = 0
    """Of the exception, from 1."""
    error: str = ""
    """The line of the exception; without an exception, the last line that reports a fatal error, or an error that the
    log ends with."""
    signature: Signature | None = None
    """The signature whose words or code explain the exception."""
    is_cascade: bool = False
    """Whether the error follows from another rank's failure."""
    is_known: bool = False
    """Whether a signature matches the error: it is not a cause then, or training survived it elsewhere."""
    time: float | None = None

    @property
    def has_error(self) -> bool:
        return self.error != "" or self.exception is not None

    @property
    def is_own_exception(self) -> bool:
        """Whether the log ends with an exception that follows from nothing that other lines may show."""
        is_whole = self.exception is not None and not self.exception.is_cut and not self.exception.is_report
        return is_whole and not self.is_known and not self.is_cascade

    @property
    def order(self) -> tuple[bool, bool, bool, float, int]:
        """Sorts the rank that failed first to the front."""
        rank = self.log.rank if self.log.rank is not None else 1 << 30
        time = self.time if self.time is not None else math.inf
        return not self.has_error, self.is_cascade, self.exception is None, time, rank


def _add_log_ending(
    diagnosis: Diagnosis, evidence: RunEvidence, everything: Sequence[LogFile], *, is_failure: bool
) -> Diagnosis:
    """The diagnosis with the end of the log of the rank that failed first, and its exception as the cause.

    Args:
        diagnosis: Without a known cause.
        evidence: What the run folder records besides its logs.
        everything: All logs.
        is_failure: Whether it is known that something failed; otherwise the logs have to show it.
    """
    ending = _find_log_ending(diagnosis.first_rank, everything, is_failure)
    if ending is None or not (is_failure or ending.has_error or diagnosis.reason):
        return diagnosis
    if diagnosis.cause and (not ending.is_own_exception or _explains_exception(diagnosis.cause, ending)):
        return diagnosis
    lines = [text for text in ending.lines if text.strip()]
    tail = tuple(log_line.shorten_line(text) for text in lines[-NUM_TAIL:])
    error_rank = None if ending.is_cascade else log_line.find_rank(ending.error)
    local_rank = None if ending.is_cascade else log_line.find_local_rank(ending.error)
    ranks = (diagnosis.first_rank, ending.log.rank, error_rank)
    rank = next((each for each in ranks if each is not None), None)
    host = diagnosis.first_host or evidence.find_host(rank)
    has_reason = bool(evidence.failures or (diagnosis.reason and diagnosis.first_rank is not None))
    diagnosis = structs.replace(
        diagnosis,
        tail=tail,
        tail_file=ending.log.name,
        first_rank=rank,
        first_local_rank=diagnosis.first_local_rank if local_rank is None else local_rank,
        first_host=host or log_line.find_host(ending.error),
    )
    effects = {cause.role for cause in diagnosis.causes if cause.role in ("symptom", "cascade") and not cause.survived}
    exception, signature = ending.exception, ending.signature
    if (
        exception
        and signature
        and not ending.is_known
        and (not effects or (not exception.is_cut and signature.role not in effects))
    ):
        cause = _build_ending_cause(ending, exception, signature, diagnosis)
        reason = diagnosis.reason if has_reason else cause.summary
        return structs.replace(diagnosis, causes=(cause, *diagnosis.causes), reason=reason)
    if ending.is_cascade:
        return diagnosis
    if ending.error and exception is None and not has_reason:
        reason = log_line.shorten_line(log_line.strip_rank_prefix(ending.error).strip())
        return structs.replace(diagnosis, reason=reason)
    return diagnosis


def _explains_exception(cause: Cause, ending: _LogEnding) -> bool:
    """Whether a line of `cause`, which is no warning, is a library's report beside the exception of the log."""
    near = (
        each
        for each in cause.evidence
        if each.file == ending.log.name and abs(ending.line_number - each.line) <= REASON_DISTANCE
    )
    is_definite = get_signature_table().by_name[cause.signature].strength == "definite"
    return is_definite and any(not log_line.is_warning(each.text) for each in near)


def _place_lead(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with a place, if no report names the rank that failed first.

    The lines of a symptom, or the only line of a consequence, blame a place; else that counts which a launcher reports
    to have failed.
    """
    lead = diagnosis.lead
    if lead is None or diagnosis.first_rank is not None:
        return diagnosis
    if lead.role == "root" and (diagnosis.first_host is not None or diagnosis.first_local_rank is not None):
        return diagnosis
    signature = get_signature_table().by_name[lead.signature]
    blamed = next((host for each in lead.evidence if (host := signature.find_blamed_host(each.text))), None)
    if blamed:
        return structs.replace(diagnosis, first_host=blamed)
    if not signature.blames_writer and lead.count > 1:
        return diagnosis
    reports = (cause for cause in diagnosis.causes if cause.signature == LAUNCHER_REPORT and not cause.survived)
    lines = [each for cause in (lead, *reports) for each in cause.evidence]
    first = next((each for each in lead.evidence if each.rank is not None), None) or next(
        (each for each in lines if each.rank is not None or each.local_rank is not None or each.host), None
    )
    if first is None:
        return diagnosis
    return structs.replace(
        diagnosis,
        first_rank=first.rank,
        first_local_rank=first.local_rank,
        first_host=first.host or diagnosis.first_host,
    )


def _build_ending_cause(
    ending: _LogEnding, exception: LoggedException, signature: Signature, diagnosis: Diagnosis
) -> Cause:
    """The last exception of a log as the cause, if no pattern explains it."""
    place = exception.format_place()
    headline = log_line.shorten_line(exception.format_headline())
    certainty = "" if signature.name == UNCAUGHT_EXCEPTION else "probably "
    rank, host = diagnosis.first_rank, diagnosis.first_host
    text = log_line.shorten_line(ending.error)
    return Cause(
        signature=signature.name,
        summary=f"{certainty}{signature.cause}: {headline}" + (f"; {place}" if place else ""),
        role=signature.role,
        action=diagnosis.action,
        fix=signature.fix,
        evidence=(Evidence(file=ending.log.name, line=ending.line_number, text=text, rank=rank, host=host),),
        ranks=() if rank is None else (rank,),
        source=signature.source,
    )


def _is_own_object_misused(exception: LoggedException) -> bool:
    """Whether a program's own code uses an object as what it is not; a module may be of another version instead."""
    is_object = exception.type in ("AttributeError", "TypeError") and not exception.message.startswith("module ")
    return is_object and exception.origin == "user code"


def _classify_exception(exception: LoggedException) -> Signature:
    """The signature that explains an exception by its words, else by the innermost line of the traceback.

    For an assertion, the asserted expression comes before the words.
    """
    table = get_signature_table()
    if exception.is_report:
        return table.by_name[LAUNCHER_REPORT]
    if exception.assertion:
        asserted = f"    {exception.assertion}"
        by_assertion = (each for each in table.signatures if each.traceback and re.search(each.traceback, asserted))
        if found_first := next(by_assertion, None):
            return found_first
    if _is_own_object_misused(exception):
        return table.by_name[UNCAUGHT_EXCEPTION]
    known = (each for each in table.signatures if each.headline and exception.type not in CODE_ERRORS)
    headline = _KEY.sub("", exception.format_headline())
    matching = [(found.end(), each.name) for each in known for found in re.finditer(f"(?i){each.headline}", headline)]
    by_words = table.by_name[max(matching)[1]] if matching else None
    if by_words and by_words.role == "root":
        return by_words
    by_code = [signature for signature in table.signatures if signature.traceback]
    for line in reversed(exception.traceback[-NUM_INNERMOST:] if by_words else exception.traceback):
        for signature in by_code:
            if re.search(signature.traceback, line):
                return signature
    return by_words or table.by_name[UNCAUGHT_EXCEPTION]


def _find_log_ending(rank: int | None, everything: Sequence[LogFile], is_failure: bool) -> _LogEnding | None:
    """The ending of the log of `rank`, else of the rank that failed first, else of the last log with any text."""
    files = [log for log in everything if log.path or not log.name.endswith(".json")]
    mine = [log for log in files if rank is not None and log.rank == rank]
    found = [ending for log in (mine or files)[:NUM_TAILS] if (ending := _read_log_ending(log, is_failure))]
    if not found:
        return None
    first = min(found, key=lambda ending: ending.order)
    if first.has_error or mine:
        return first
    return ([ending for ending in found if ending.log.rank is not None] or found)[-1]


def _read_log_ending(log: LogFile, is_failure: bool) -> _LogEnding | None:
    try:
        content = logs.read_log(log, logs.SMALLEST)
    except PrimusError:
        return None
    if not content.windows:
        return None
    window = content.windows[-1]
    before = max(0, len(window.lines) - NUM_UNKNOWN)
    lines = tuple(map(log_line.decode_plain_text, window.lines[before:]))
    if not any(text.strip() for text in lines):
        return None
    begin = next((index + 1 for index in range(len(lines) - 1, -1, -1) if is_progress(window.lines[before + index])), 0)
    late = ("",) * begin + lines[begin:]  # an error before the last step did no harm
    if not is_failure:  # the program went on after an exception that many messages follow
        ending = find_ending(window)
        late = tuple(text if ending.holds(before + index, text) else "" for index, text in enumerate(late))
    exception = python_exception.find_last_exception(late)
    index = exception.index if exception else _find_error_line(late)
    signature = _classify_exception(exception) if exception else None
    error = late[index] if index is not None else ""
    matching = [each for each in get_signature_table().signatures if each.matches(error)]
    times = (log_line.find_time(text, content.mtime) for text in reversed(late[: (index or 0) + 1]))
    return _LogEnding(
        log=log,
        lines=lines,
        exception=exception,
        line_number=logs.count_lines_before(log, window.offset) + before + (index or 0) + 1,
        error=error,
        signature=signature,
        is_cascade=any(
            each.role in ("symptom", "cascade") for each in (*matching, *((signature,) if signature else ()))
        ),
        is_known=bool(matching),
        time=next((time for time in times if time is not None), None),
    )


def _find_error_line(lines: Sequence[str]) -> int | None:
    """Index of the last line that reports a fatal error, or of an error that the log ends with."""
    last = [index for index in range(max(0, len(lines) - NUM_FATAL), len(lines)) if lines[index].strip()]
    fatal = next((index for index in reversed(last) if _FATAL.search(lines[index])), None)
    if fatal is not None:
        return fatal
    index = next((index for index in reversed(last) if not is_quoted(lines[index].encode())), None)
    text = log_line.strip_rank_prefix(lines[index]) if index is not None else ""
    is_calm = log_line.is_warning(text) or log_line.is_info(text) or log_line.has_low_level(text)
    is_calm = is_calm or _GOES_ON.search(text) is not None
    return index if _ERROR.search(text) and not is_calm else None

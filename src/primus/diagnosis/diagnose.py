"""From the logs of an attempt to its cause."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus.diagnosis import kernel_log, log_line, log_sources, logs, run_evidence
from primus.diagnosis.cause_ranking import ERROR_SUFFIX, rank_causes
from primus.diagnosis.finding import Cause, Diagnosis, Evidence
from primus.diagnosis.logs import LogContent, LogFile
from primus.diagnosis.run_evidence import RunEvidence
from primus.diagnosis.scan import LogScan, LogScanner, is_progress
from primus.diagnosis.signatures import SIGNATURES
from primus.errors import PrimusError, UsageError
from primus.runs.store import Run

__all__ = ["ERROR_SUFFIX", "Cause", "Diagnosis", "Evidence", "diagnose_logs", "diagnose_run"]

QUICK_BYTES = 32 * 1024 * 1024
"""Read at a failure, while a job waits for the decision."""
THOROUGH_BYTES = 1024 * 1024 * 1024
"""Read when a person asks."""
NUM_READERS = 8
MANY_LOGS = 16
NUM_TAIL = 20
NUM_UNKNOWN = 2000
"""Last lines in which an exception is looked for."""
NUM_FATAL = 50
"""Last lines in which a fatal error without an exception is looked for."""
NUM_TAILS = 512
"""Logs whose end is read where no signature is known: who failed first is among them, and a file system is slow."""
KERNEL_S = 3600.0
"""Before the last change of the logs: what the kernel wrote earlier is of something else."""
KILLS = ("killed", "died-silently")
"""Signatures after which the kernel's log is looked at: it may have killed for want of memory."""
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure)\b(?::.*)?$")
_FATAL = re.compile(
    r"\b(?:FATAL|CRITICAL|PANIC)\b|^(?:fatal|panic): |\(core dumped\)|^Aborted\b|terminate called after"
)
"""Words by which programs that raise no exception say that they end."""


def diagnose_run(
    run: Run,
    attempt: int | None = None,
    *,
    budget_bytes: int = QUICK_BYTES,
    kernel: bool | None = None,
    besides: Sequence[Path] = (),
) -> Diagnosis:
    """What the logs of an attempt of `run` say.

    Args:
        run: The run folder.
        attempt: The newest one by default.
        budget_bytes: How much is read of all logs together.
        kernel: Whether to read the kernel's log of this node; None where a process was killed and nothing says why.
        besides: Logs of the run that are not in its folder.
    """
    number = log_sources.newest_attempt(run) if attempt is None else attempt
    said = run_evidence.collect_run_evidence(run, number)
    began = log_sources.read_attempt_begin(run, number)
    outside = [
        LogFile(name=str(path), path=path, attempt=number, since=log_sources.find_attempt_start(number, began))
        for path in besides
    ]
    told = [] if said.failures else log_sources.read_recorded_reason(run, number)
    everything = [*log_sources.find_attempt_logs(run, number, began), *outside, *said.logs, *told]
    first = {failure.rank for failure in said.failures[:1]}
    scans, notes = _scan_logs(everything, budget_bytes, first)

    def seen_before(name: str) -> bool:
        if number == 0:
            return False
        before = diagnose_run(run, number - 1, budget_bytes=QUICK_BYTES, kernel=False).cause
        return before is not None and before.signature == name

    diagnosis = rank_causes(scans, said, seen_before)
    top = diagnosis.cause
    if kernel or (kernel is None and top is not None and top.signature in KILLS):
        found, note = _kernel_scan(began)
        notes += [note] if note else []
        diagnosis = rank_causes([*scans, *found], said, seen_before)
    if diagnosis.cause is None:
        diagnosis = _describe_unknown_cause(diagnosis, said, everything, is_failure=True)
        if not diagnosis.reason and told:
            diagnosis = structs.replace(diagnosis, reason=log_line.shorten_line((told[0].data or b"").decode()))
    return structs.replace(diagnosis, notes=(*notes, *diagnosis.notes))


def diagnose_logs(
    paths: Sequence[Path], *, budget_bytes: int = THOROUGH_BYTES, kernel: bool = False, texts: Sequence[LogFile] = ()
) -> Diagnosis:
    """What logs say that belong to no run folder, such as a scheduler's or another launcher's.

    Args:
        paths: Files, or folders of files.
        budget_bytes: How much is read of all logs together.
        kernel: Whether to read the kernel's log of this node.
        texts: Logs that are no files.

    Raises:
        UsageError: There is no log.
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
        raise PrimusError(notes[0], "give a log, a run folder, or a folder of logs")
    if kernel:
        newest = max((scan.mtime for scan in scans if scan.mtime), default=time.time())
        found, note = _kernel_scan(newest - KERNEL_S)
        scans, notes = [*scans, *found], notes + ([note] if note else [])
    diagnosis = rank_causes(scans, RunEvidence(), lambda name: False)
    if diagnosis.cause is None:
        diagnosis = _describe_unknown_cause(
            diagnosis, RunEvidence(), everything, is_failure=diagnosis.first_rank is not None
        )
    return structs.replace(diagnosis, notes=(*notes, *diagnosis.notes))


def _scan_logs(everything: Sequence[LogFile], budget_bytes: int, first: set[int]) -> tuple[list[LogScan], list[str]]:
    """What each log shows, and which could not be read."""
    limit = logs.compute_read_limit(budget_bytes, len(everything))
    scanner, scans, notes = LogScanner(), [], []
    for log, content in _read_contents(everything, limit, first):
        if isinstance(content, PrimusError):
            notes.append(content.problem)
        else:
            scans.append(scanner.scan_log(log, content))
    return scans, notes


def _read_contents(
    everything: Sequence[LogFile], limit: int, first: set[int]
) -> Iterator[tuple[LogFile, LogContent | PrimusError]]:
    """Every log with what was read of it; many are read side by side, a few ahead, for file systems that are slow."""

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


def _kernel_scan(began: float | None) -> tuple[list[LogScan], str]:
    data, problem = kernel_log.read_kernel_log(began)
    if problem or not data:
        return [], problem
    log = LogFile(name="kernel log", data=data, host=socket.gethostname(), is_kernel=True)
    return [LogScanner().scan_log(log, logs.read_log(log, len(data)))], ""


class _LogEnding(Struct, frozen=True, kw_only=True):
    """The end of a log behind the last step that it reports."""

    log: LogFile
    lines: tuple[str, ...] = ()
    error: str = ""
    """The exception, or the last line that speaks of a fatal error."""
    is_cascade: bool = False
    """Whether the error follows from another rank's failure."""
    time: float | None = None

    @property
    def order(self) -> tuple[bool, bool, float, int]:
        """Sorts who failed first to the front."""
        rank = self.log.rank if self.log.rank is not None else 1 << 30
        return not self.error, self.is_cascade, self.time if self.time is not None else math.inf, rank


def _describe_unknown_cause(
    diagnosis: Diagnosis, said: RunEvidence, everything: Sequence[LogFile], *, is_failure: bool
) -> Diagnosis:
    """The diagnosis with the end of the log of who failed first.

    Args:
        diagnosis: Without a known cause.
        said: What else is known.
        everything: All logs.
        is_failure: Whether it is known that something failed; otherwise the logs have to show it.
    """
    words = _find_log_ending(diagnosis.first_rank, everything)
    if words is None or not (is_failure or words.error or diagnosis.reason):
        return diagnosis
    shown = tuple(log_line.shorten_line(text) for text in words.lines[-NUM_TAIL:])
    reason = diagnosis.reason
    if words.error and not said.failures and not (reason and diagnosis.first_rank is not None):
        reason = (
            log_line.shorten_line(log_line.strip_rank_prefix(words.error).strip()) if not words.is_cascade else reason
        )
    rank = diagnosis.first_rank if diagnosis.first_rank is not None else words.log.rank
    host = diagnosis.first_host or said.find_host(rank)
    return structs.replace(
        diagnosis, reason=reason, tail=shown, tail_file=words.log.name, first_rank=rank, first_host=host
    )


def _find_log_ending(rank: int | None, everything: Sequence[LogFile]) -> _LogEnding | None:
    """Of the log of `rank`, else of the rank that failed first, else of the last log that says anything."""
    files = [log for log in everything if log.path or not log.name.endswith(".json")]
    mine = [log for log in files if rank is not None and log.rank == rank]
    found = [words for log in (mine or files)[:NUM_TAILS] if (words := _read_log_ending(log))]
    if not found:
        return None
    first = min(found, key=lambda words: words.order)
    return first if first.error or mine else ([words for words in found if words.log.rank is not None] or found)[-1]


def _read_log_ending(log: LogFile) -> _LogEnding | None:
    try:
        content = logs.read_log(log, logs.SMALLEST)
    except PrimusError:
        return None
    if not content.windows:
        return None
    raw = content.windows[-1].lines[-NUM_UNKNOWN:]
    begin = next((index + 1 for index in range(len(raw) - 1, -1, -1) if is_progress(raw[index])), 0)
    lines = [text for text in map(log_line.decode_plain_text, raw) if text.strip()]
    if not lines:
        return None
    late = [text for text in map(log_line.decode_plain_text, raw[begin:]) if text.strip()]
    index = _find_error(late)
    error = late[index] if index is not None else ""
    time = next(
        (found for text in reversed(late[: (index or 0) + 1]) if (found := log_line.find_time(text, content.mtime))),
        None,
    )
    is_cascade = any(signature.role == "cascade" and signature.is_shown_by(error) for signature in SIGNATURES)
    return _LogEnding(log=log, lines=tuple(lines), error=error, is_cascade=is_cascade, time=time)


def _find_error(lines: Sequence[str]) -> int | None:
    """Index of the last exception; without one, of the last line that speaks of a fatal error."""
    for index in range(len(lines) - 1, -1, -1):
        if _EXCEPTION.match(log_line.strip_rank_prefix(lines[index]).strip()):
            return index
    for index in range(len(lines) - 1, max(-1, len(lines) - NUM_FATAL - 1), -1):
        if _FATAL.search(lines[index]):
            return index
    return None

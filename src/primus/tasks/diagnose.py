"""Diagnose a failed run or job by its logs: cause, evidence, fix, and what the launcher does about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs

from primus.diagnosis import diagnose, log_sources
from primus.diagnosis.cause_ranking import describe_place
from primus.diagnosis.diagnose import THOROUGH_BYTES
from primus.diagnosis.finding import Cause, Diagnosis, Evidence
from primus.diagnosis.logs import LogFile, read_stream_log
from primus.diagnosis.signature_files import load_signatures
from primus.errors import EXIT_OK, PrimusError, UsageError
from primus.launch.jobs import logs, submissions
from primus.launch.jobs.submissions import RECORD
from primus.report import table
from primus.runs import store
from primus.runs.files import read_json
from primus.runs.store import Run
from primus.runtime import Submission
from primus.task import TaskContext

EXIT_UNKNOWN = 4
"""Something failed, and neither a signature nor an exception shows why."""
STANDARD_INPUT = "-"
NEXT_STEP = (
    "read the end of the log below; give the logs of all ranks and of the launcher together (a folder), or run it "
    "again with --env PYTHONFAULTHANDLER=1 --env NCCL_DEBUG=INFO --env TORCH_SHOW_CPP_STACKTRACES=1"
)
"""For a failure that no line explains."""
LAUNCHER = {
    "retry": "restarts, up to --max-restarts times",
    "exclude": "restarts without {host} if another node is available",
    "stop": "does not restart: the failure would recur",
}


class Options(Struct, frozen=True, kw_only=True):
    """Options of `diagnose`."""

    what: Annotated[tuple[str, ...], Meta(extra={"positional": True, "names": "run"})]
    """A run (folder, run id, experiment name for its newest run, or job id), or logs and folders of logs; - reads
    standard input."""
    attempt: int | None = None
    """Attempt of the run; default: the newest."""
    all: bool = False
    """Show all causes and consequences with their lines."""
    kernel_log: bool = False
    """Also read the kernel log of this node."""
    workspace: str = "./output"
    """Folder that contains the run folders."""


class DiagnosisAnswer(Struct, frozen=True, kw_only=True):
    """The diagnosis, and its subject."""

    what: str
    run: str | None = None
    attempt: int | None = None
    state: str | None = None
    is_known: bool = False
    """Whether a cause was found, or nothing failed."""
    diagnosis: Diagnosis


def run(options: Options, context: TaskContext) -> int:
    """Print the diagnosis and return 0 if the cause is known or nothing failed, else 4.

    Raises:
        UsageError: The run, job or log does not exist.
        PrimusError: A log cannot be read.
    """
    load_signatures()  # a wrong file of the user is reported before anything is read
    found = _find_run_with_logs(options, context)
    answer = _diagnose_run(found[0], found[1], options) if found else _diagnose_logs(options, context)
    context.result(answer, _format_answer(answer, options.all))
    return EXIT_OK if answer.is_known else EXIT_UNKNOWN


def _find_run_with_logs(options: Options, context: TaskContext) -> tuple[Run, list[Path]] | None:
    """The run that the option names, with its logs outside the run folder; None if it names logs.

    Raises:
        UsageError: It names neither.
    """
    name = options.what[0]
    for folder in (Path(name), Path(name) / "latest"):
        if os.path.isfile(folder / "metadata.json"):
            if len(options.what) > 1:
                raise UsageError("diagnose takes one run, or logs", f"diagnose {name}")
            return _add_scheduler_logs(Run(folder.resolve()))
    if name == STANDARD_INPUT or os.path.exists(name):
        return None
    try:
        return _add_scheduler_logs(store.find_run(name, Path(options.workspace)))
    except UsageError as error:
        return _find_run_of_job(name, context, error)


def _add_scheduler_logs(run: Run) -> tuple[Run, list[Path]]:
    try:
        submission = read_json(run.directory / RECORD, Submission)
    except PrimusError:  # the run was not submitted to a scheduler
        return run, []
    return run, _find_scheduler_logs(run, submission)


def _find_scheduler_logs(run: Run, submission: Submission) -> list[Path]:
    """Logs that the scheduler writes outside the run folder."""
    files = [path for path in logs.list_log_files(submission, None) if path.is_file()]
    return [path for path in files if not path.resolve().is_relative_to(run.directory)]


def _find_run_of_job(name: str, context: TaskContext, error: UsageError) -> tuple[Run, list[Path]]:
    """The run of a job that was submitted from this machine; raises `error` if there is none."""
    try:
        submission = submissions.find_submission(name, context.environ)
    except UsageError:
        is_path = "/" in name or "." in name
        raise (_build_missing_path_error(name) if is_path else error) from None
    run = Run(Path(submission.directory))
    return run, _find_scheduler_logs(run, submission)


def _diagnose_run(run: Run, extra_logs: list[Path], options: Options) -> DiagnosisAnswer:
    metadata = run.read_metadata()
    newest = log_sources.find_newest_attempt(run)
    number = newest if options.attempt is None else options.attempt
    if not 0 <= number <= newest:
        raise UsageError(f"--attempt {number}: the run has attempts 0 to {newest}")
    is_active = run.is_active()
    state: str = metadata.outcome.state if number == newest else "failed"
    if state == "running" and not is_active:
        state = "died" if metadata.started else state
    answer = DiagnosisAnswer(what=metadata.name, run=run.id, attempt=number, state=state, diagnosis=Diagnosis())
    if state in ("done", "planned"):
        reason = "nothing failed" if state == "done" else "the run has not started"
        if state == "done" and newest:
            reason += f"; attempt {newest - 1} failed: --attempt {newest - 1}"
        return structs.replace(answer, is_known=True, diagnosis=Diagnosis(reason=reason))
    kernel = True if options.kernel_log else None
    found = diagnose.diagnose_run(run, number, budget_bytes=THOROUGH_BYTES, kernel=kernel, extra_logs=extra_logs)
    if found.cause is None and state == "interrupted":
        found = structs.replace(found, reason=f"the run was stopped: {metadata.outcome.reason}", tail=())
        return structs.replace(answer, is_known=True, diagnosis=found)
    if found.cause is None and is_active and not found.reason:
        found = structs.replace(found, reason="the run is active, and nothing has failed so far", tail=())
        return structs.replace(answer, is_known=True, diagnosis=found)
    if state == "died" and not found.reason:
        found = structs.replace(found, reason="the launcher exited without a report: it was killed, or its node failed")
    return structs.replace(answer, is_known=_names_cause(found), diagnosis=found)


def _diagnose_logs(options: Options, context: TaskContext) -> DiagnosisAnswer:
    texts: list[LogFile] = []
    notes: list[str] = []
    paths = [Path(name) for name in options.what if name != STANDARD_INPUT]
    if options.attempt is not None:
        raise UsageError("--attempt applies to a run, not to logs")
    for path in paths:
        _check_readable(path)
    if len(paths) < len(options.what):
        if sys.stdin is None:
            raise UsageError("standard input is closed", "give a log: diagnose - < FILE")
        log, note = read_stream_log("standard input", sys.stdin.buffer)
        texts, notes = [log], [note] if note else []
    if texts and not texts[0].data:
        raise UsageError("standard input is empty", "give a log: diagnose - < FILE")
    found = diagnose.diagnose_logs(paths, kernel=options.kernel_log, texts=texts)
    found = structs.replace(found, notes=(*notes, *found.notes))
    is_known = _names_cause(found) or not found.reason
    return DiagnosisAnswer(what=", ".join(options.what), is_known=is_known, diagnosis=found)


def _names_cause(found: Diagnosis) -> bool:
    return found.lead is not None and found.lead.role != "cascade"


def _build_missing_path_error(path: str | Path) -> UsageError:
    return UsageError(f"{path}: no such file or folder", "give a log, a run, or a folder of logs")


def _check_readable(path: Path) -> None:
    """Raise UsageError if `path` cannot be read."""
    if not os.path.exists(path):
        raise _build_missing_path_error(path)
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise UsageError(f"{path}: permission denied", "ask its owner for read permission")
    if path.is_file() and path.stat().st_size == 0:
        raise UsageError(
            f"{path}: the log is empty", "its program exited before it wrote anything; diagnose other logs"
        )


def _format_answer(answer: DiagnosisAnswer, is_full: bool) -> str:
    found = answer.diagnosis
    parts = [_format_answer_title(answer)]
    lead = found.lead if found.reason else None
    parts += [_format_labeled_rows(_format_cause_rows(lead, answer) if lead else _format_unknown_rows(answer))]
    others = [cause for cause in found.causes if cause is not lead]
    parts += ["\n".join(line for cause in others for line in _format_other_cause(cause, is_full))] if others else []
    parts += ["\n".join(f"note: {note}" for note in found.notes)] if found.notes else []
    return "\n\n".join(parts)


def _format_answer_title(answer: DiagnosisAnswer) -> str:
    if answer.run is None:
        num_logs = answer.diagnosis.num_logs
        return f"{answer.what}: {num_logs} {'log' if num_logs == 1 else 'logs'}"
    return f"run {answer.run} ({answer.what}), attempt {answer.attempt}: {answer.state}"


def _format_labeled_rows(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name + ':' if name else '':<11}{value}".rstrip() for name, value in rows)


def _format_cause_rows(cause: Cause, answer: DiagnosisAnswer) -> list[tuple[str, str]]:
    found = answer.diagnosis
    is_cascade = cause.role == "cascade"
    own = f"; {found.reason}" if is_cascade and cause.summary not in found.reason else ""
    summary = f"unknown: the logs show only consequences: {cause.summary}{own}" if is_cascade else cause.summary
    first = next((each for each in cause.evidence if each.time is not None), None)
    at = f", {table.format_time(first.time)}" if first else ""
    lines = [_format_evidence(each) for each in cause.evidence]
    return [
        ("cause", f"{summary} [{cause.signature}]"),
        *([("first", _format_failure_place(found) + at)] if _format_failure_place(found) else []),
        *((("evidence" if not number else ""), line) for number, line in enumerate(lines)),
        *([("shown by", f"{_format_rank_list(cause.ranks)}")] if len(cause.ranks) > 1 else []),
        ("fix", cause.fix),
        *([("launcher", _format_launcher_action(found))] if answer.run or cause is found.cause else []),
        *(_tail_rows(found) if cause.role != "symptom" else []),
    ]


def _format_unknown_rows(answer: DiagnosisAnswer) -> list[tuple[str, str]]:
    found = answer.diagnosis
    if answer.is_known:
        return [("cause", found.reason or "no sign of a failure was found")]
    rows = [("cause", "unknown" + (f": {found.reason}" if found.reason else ""))]
    rows += [("first", _format_failure_place(found))] if _format_failure_place(found) else []
    rows += [("fix", NEXT_STEP)]
    rows += [("launcher", _format_launcher_action(found))] if answer.run else []
    return rows + _tail_rows(found)


def _tail_rows(found: Diagnosis) -> list[tuple[str, str]]:
    """The end of the first failing rank's log, if no signature matched."""
    return [("log", found.tail_file), *(("", f"  {text}") for text in found.tail)] if found.tail else []


def _format_launcher_action(found: Diagnosis) -> str:
    return LAUNCHER[found.action].format(host=found.first_host or "its node")


def _format_failure_place(found: Diagnosis) -> str:
    return describe_place(found.first_rank, found.first_host, found.first_local_rank)


def _format_evidence(evidence: Evidence) -> str:
    return f"{evidence.file}:{evidence.line}: {evidence.text}"


def _format_other_cause(cause: Cause, is_full: bool) -> list[str]:
    kind = {"root": "also", "symptom": "followed", "cascade": "followed", "info": "info"}[cause.role]
    survived = "; training continued after it" if cause.survived else ""
    ranks = f" ({_format_rank_list(cause.ranks)})" if cause.ranks else ""
    head = f"{kind + ':':<11}{cause.summary} [{cause.signature}]{ranks}{survived}"
    shown = cause.evidence if is_full else cause.evidence[:1] if cause.role == "root" else ()
    return [head, *(f"{'':<11}{_format_evidence(each)}" for each in shown)]


def _format_rank_list(ranks: tuple[int, ...]) -> str:
    """`ranks 0-2, 5 (4 in all)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in spans]
    more = ", ..." if len(shown) > 8 else ""
    return f"ranks {', '.join(shown[:8])}{more} ({len(ranks)} in all)"

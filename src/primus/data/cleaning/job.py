"""Cleaning of documents from end to end: read, judge, write, report; whatever is interrupted goes on.

cleaned = clean(Job(inputs=("corpus/*.jsonl",), output=Path("out/clean"), recipe=recipe.load("fineweb")), say, show)
cleaned.files, cleaned.report.kept
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

import primus
from primus.data import atomic, executors, inputs, result_folder
from primus.data.cleaning import recipe as recipes
from primus.data.cleaning import report as reports
from primus.data.cleaning.recipe import Recipe
from primus.data.cleaning.report import Removed, Report, Sample
from primus.data.cleaning.stage import CleanStage, Compression, suffix
from primus.data.executors import Executor
from primus.data.inputs import Inputs
from primus.data.manifest import FileFacts
from primus.data.work import Board, Row, open_board
from primus.data.workers import Show
from primus.errors import PrimusError, UsageError

MANIFEST = "manifest.json"
PUBLISH_TIMEOUT_S = 3600.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to clean, how, and where to."""

    inputs: tuple[str, ...] = ()
    """Files, folders, patterns and URLs."""
    dataset: str | None = None
    """Named dataset instead of files."""
    output: Path
    """Folder for the documents that are kept; pages for people are beside it, ``OUTPUT.report.md`` and ``.html``."""
    recipe: Recipe
    """Rules and thresholds; see `primus.data.cleaning.recipe.load`."""
    json_key: str = "text"
    """Field or column of the text."""
    text_documents: str = "file"
    """What is a document in a .txt file."""
    compression: Compression = "zst"
    """Of the files that are written."""
    keep_removed: bool = False
    """Write what is removed too, with the reason, into ``OUTPUT.removed``: no folder that another step may read."""
    max_bad: int = 0
    """Bad documents that may be left out."""
    workers: int | None = None
    """Processes; all cores when None."""
    executor: Executor = "local"
    """Who works: processes of this machine or the tasks of a Ray cluster."""
    existing: Literal["check", "replace"] = "check"
    """Other data that is at the output is an error, or is replaced."""


@dataclass(frozen=True)
class Cleaned:
    """The result of a job."""

    folder: Path
    """The job's output."""
    files: list[Path]
    """The documents that were kept, in the order of the input."""
    report: Report
    """What was done."""
    made: bool
    """Whether it was made now; false if it was there."""


def clean(job: Job, say: Say = lambda text: None, show: Show = lambda progress: None) -> Cleaned:
    """Write the documents of an input that the rules keep, as they leave them; the same job again finds them written.

    The folder appears whole or not at all, its manifest tells what is in it. Several processes, also on other machines,
    that do the same job share the work, and the result does not depend on their number.

    Args:
        job: What to do.
        say: Receives lines for people.
        show: Receives the progress.

    Raises:
        UsageError: An input is missing or unknown, a package that a rule needs is not installed, or other data is at
            the output.
        PrimusError: Too many documents are bad, a file is damaged, or the output cannot be written.
    """
    _check(job)
    job.recipe.start()
    source = inputs.open_dataset(job.dataset) if job.dataset else inputs.open_files(job.inputs, job.text_documents)
    stage = _stage(job)
    identity = _identity(stage, source)
    if found := _existing(job, identity):
        say(f"{job.output}: nothing to do, it was made from the same input before")
        return found
    folder = job.output.with_name(f".{job.output.name}.work")
    try:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        board = open_board(stage, source.shards, folder, job.max_bad)
        rows = executors.run(board, job.executor, job.workers, "cleaning", show)
        if len(rows) == len(source.shards):
            source.check_unchanged()
            return _publish(job, board, rows, _report(job, identity, source, rows), say)
    except OSError as error:
        raise atomic.cannot_write(job.output, error) from None
    if done := _existing(job, identity):
        return done
    raise PrimusError(f"{folder}: removed while it was in use", "run the same command again")


def report_page(output: Path, kind: str = "md") -> Path:
    """The page for people that belongs to an output: ``md`` or ``html``."""
    return output.with_name(f"{output.name}.report.{kind}")


def removed_folder(output: Path) -> Path:
    """Where what was removed is."""
    return output.with_name(f"{output.name}.removed")


def _check(job: Job) -> None:
    if bool(job.inputs) == bool(job.dataset):
        raise UsageError("both an input and a dataset" if job.inputs else "nothing to clean", "give one of them")
    if job.output.name in ("", "."):
        raise UsageError(f"output '{job.output}' is no name of a folder", "give a new folder like data/clean")


def _stage(job: Job) -> CleanStage:
    settings = {
        "recipe": job.recipe.content(),
        "json_key": job.json_key,
        "text_documents": job.text_documents,
        "compression": job.compression,
        "keep_removed": job.keep_removed,
    }
    return CleanStage(settings, job.recipe, job.json_key, job.text_documents, job.compression, job.keep_removed)


def _identity(stage: CleanStage, source: Inputs) -> str:
    return hashlib.sha256(msgspec.json.encode([stage.identity, source.identity], order="deterministic")).hexdigest()


def _existing(job: Job, identity: str) -> Cleaned | None:
    """What is at the output if the same job has made it.

    Raises:
        UsageError: There is something else, and the job does not replace it.
    """
    if not job.output.exists() or (job.output.is_dir() and not any(job.output.iterdir())):
        return None
    try:
        report = msgspec.json.decode((job.output / MANIFEST).read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError):
        report = None
    if report and _is_result(job, identity, report):
        return Cleaned(job.output, [job.output / name for name in sorted(report.files)], report, made=False)
    if job.existing == "replace" and report:
        return None
    difference = _difference(job, report) if report else f"it has no {MANIFEST}"
    hint = "give another --output" + (", or replace it with --overwrite" if report else "")
    raise UsageError(f"{job.output} is there already and was made otherwise: {difference}", hint)


def _is_result(job: Job, identity: str, report: Report) -> bool:
    return (
        report.identity == identity
        and len(report.bad) <= job.max_bad
        and _has_files(job.output, report.files)
        and _has_files(removed_folder(job.output), report.removed_files)
    )


def _has_files(folder: Path, files: dict[str, FileFacts]) -> bool:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}
    return all(sizes.get(name) == facts.bytes for name, facts in files.items())


def _difference(job: Job, report: Report) -> str:
    if report.fingerprint != job.recipe.fingerprint():
        return f"by recipe {report.recipe}, or another version of it"
    if report.inputs != _given(job):
        return f"its input is {', '.join(report.inputs)}"
    return "an input or the result has changed since, or other settings were given"


def _given(job: Job) -> list[str]:
    return [inputs.DATASET + job.dataset] if job.dataset else list(job.inputs)


def _report(job: Job, identity: str, source: Inputs, rows: Sequence[Row]) -> Report:
    counts, edits = Counter[str](), Counter[str]()
    for row in rows:
        counts.update(row.counts)
        edits.update(row.facts["edits"])
    removed = [msgspec.convert(row.facts["removed"], list[Removed]) for row in rows]
    samples = [sample for row in rows for sample in msgspec.convert(row.facts["samples"], list[Sample])]
    return Report(
        version=recipes.VERSION,
        primus=primus.__version__,
        identity=identity,
        inputs=_given(job),
        recipe=job.recipe.name,
        fingerprint=job.recipe.fingerprint(),
        content=job.recipe.content(),
        documents=counts["documents"],
        kept=counts["kept"],
        characters=counts["characters"],
        kept_characters=counts["kept_characters"],
        words=counts["words"],
        kept_words=counts["kept_words"],
        empty=counts["empty"],
        bad=[item for row in rows for item in row.bad],
        removed=reports.add_removed([rule.name for rule in job.recipe.rules], removed),
        edits=dict(sorted(edits.items())),
        samples=reports.choose_samples(samples),
    )


def _publish(job: Job, board: Board, rows: Sequence[Row], report: Report, say: Say) -> Cleaned:
    """Give the files their folder, and remove what they were made from."""
    lock = job.output.with_name(f".{job.output.name}.lock")
    work = board.folder.parent
    with atomic.lock(lock, PUBLISH_TIMEOUT_S, lambda holder: say(f"waiting for {holder} to write {job.output}")):
        if found := _existing(job, report.identity):
            return found
        ending = suffix(job.compression)
        final = result_folder.new_folder(work, "final")
        files = result_folder.collect(board, rows, ending, final, ending)
        removed_files = {}
        if job.keep_removed:
            removed = result_folder.new_folder(work, "removed")
            removed_files = result_folder.collect(board, rows, f"removed.{ending}", removed, ending)
            result_folder.move(removed, removed_folder(job.output), work)
        report = msgspec.structs.replace(report, files=files, removed_files=removed_files)
        with atomic.staged({final / MANIFEST: msgspec.json.format(msgspec.json.encode(report), indent=1)}) as publish:
            publish()
        result_folder.move(final, job.output, work)
        report_page(job.output).write_text(reports.markdown(report), encoding="utf-8")
        report_page(job.output, "html").write_text(reports.html(report), encoding="utf-8")
        shutil.rmtree(work, ignore_errors=True)
    for line in reports.summary(report).splitlines():
        say(line)
    return Cleaned(job.output, [job.output / name for name in sorted(files)], report, made=True)

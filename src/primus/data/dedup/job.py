"""Removal of repeated documents from end to end: hash, match, cluster, write; whatever is interrupted goes on.

done = dedup(Job(inputs=("corpus/*.jsonl",), output=Path("out/unique")), say, show)
done.files, done.report.kept
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

import primus
from primus.data import atomic, inputs, result_folder
from primus.data.dedup import compared, pipeline
from primus.data.dedup import report as reports
from primus.data.dedup.pipeline import Plan, Stages
from primus.data.dedup.recipe import VERSION, Recipe
from primus.data.dedup.report import Report
from primus.data.document_writer import SUFFIX
from primus.data.executors import Executor
from primus.data.inputs import Inputs
from primus.data.workers import Show
from primus.errors import PrimusError, UsageError

REPORT = "dedup.json"
PUBLISH_TIMEOUT_S = 3600.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to deduplicate, and where to."""

    inputs: tuple[str, ...] = ()
    """Files, folders, patterns and URLs."""
    dataset: str | None = None
    """Named dataset instead of files."""
    output: Path
    """Folder for the documents that are kept, as .jsonl.zst; beside it ``OUTPUT.report.md`` and ``.html``."""
    recipe: Recipe = field(default_factory=Recipe)
    """What counts as a repetition."""
    json_key: str = "text"
    """Field or column of the text."""
    text_documents: str = "file"
    """What is a document in a .txt file."""
    max_bad: int = 0
    """Bad documents that may be left out."""
    workers: int | None = None
    """Processes; all cores when None."""
    executor: Executor = "local"
    """Who does the work."""
    existing: Literal["check", "replace"] = "check"
    """Other data that is at the output is an error, or is replaced."""


@dataclass(frozen=True)
class Deduplicated:
    """The result of a job."""

    folder: Path
    """The job's output."""
    files: list[Path]
    """The documents that were kept, in the order of the input."""
    report: Report
    """What was done."""
    made: bool
    """Whether it was made now; false if it was there."""


def dedup(job: Job, say: Say = lambda text: None, show: Show = lambda progress: None) -> Deduplicated:
    """Write the documents of an input without those that repeat an earlier one; the same job again finds them written.

    Of similar documents the first in the order of the input is kept, whatever the number of workers. The folder appears
    whole or not at all. Several processes, also on other machines, that do the same job share the work.

    Args:
        job: What to do.
        say: Receives lines for people.
        show: Receives the progress.

    Raises:
        UsageError: An input is missing or unknown, a setting is wrong, or other data is at the output.
        PrimusError: Too many documents are bad, a file is damaged, or the output cannot be written.
    """
    _check(job)
    source = inputs.open_dataset(job.dataset) if job.dataset else inputs.open_files(job.inputs, job.text_documents)
    identity = _identity(job, source)
    if found := _existing(job, identity):
        say(f"{job.output}: nothing to do, it was made from the same input before")
        _complete(job, found.report)
        return found
    try:
        return _make(job, source, identity, say, show)
    except (pipeline.FinishedElsewhere, PrimusError, OSError) as error:
        if found := _existing(job, identity):  # another process has finished, and has taken away what this one needs
            _complete(job, found.report)
            return found
        if isinstance(error, PrimusError):
            raise
        if isinstance(error, OSError):
            raise atomic.cannot_write(job.output, error) from None
    raise PrimusError(f"{_work_folder(job)}: removed while it was in use", "run the same command again")


def report_page(output: Path, kind: str = "md") -> Path:
    """The page for people that belongs to an output: ``md`` or ``html``."""
    return output.with_name(f"{output.name}.report.{kind}")


def _make(job: Job, source: Inputs, identity: str, say: Say, show: Show) -> Deduplicated:
    job.output.parent.mkdir(parents=True, exist_ok=True)
    stages = pipeline.run(_plan(job, source, identity), show)
    source.check_unchanged()
    return _publish(job, stages, _report(job, identity, stages), say)


def _work_folder(job: Job) -> Path:
    return job.output.with_name(f".{job.output.name}.work")


def _lock(job: Job) -> Path:
    return job.output.with_name(f".{job.output.name}.lock")


def _check(job: Job) -> None:
    job.recipe.check()
    if bool(job.inputs) == bool(job.dataset):
        raise UsageError("both an input and a dataset" if job.inputs else "nothing to deduplicate", "give one of them")
    if job.output.name in ("", "."):
        raise UsageError(f"output '{job.output}' is no name of a folder", "give a new folder like data/unique")


def _identity(job: Job, source: Inputs) -> str:
    parts = [VERSION, job.recipe, job.json_key, job.text_documents, source.identity]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def _existing(job: Job, identity: str) -> Deduplicated | None:
    """What is at the output if the same job has made it.

    Raises:
        UsageError: There is something else, and the job does not replace it.
    """
    if not job.output.exists() or (job.output.is_dir() and not any(job.output.iterdir())):
        return None
    try:
        report = msgspec.json.decode((job.output / REPORT).read_bytes(), type=Report)
    except (OSError, msgspec.MsgspecError):
        report = None
    if report and _is_result(job, identity, report):
        return Deduplicated(job.output, [job.output / name for name in sorted(report.files)], report, made=False)
    if job.existing == "replace" and report:
        return None
    difference = _difference(job, report) if report else f"it has no {REPORT}"
    hint = "give another --output" + (", or replace it with --overwrite" if report else "")
    raise UsageError(f"{job.output} is there already and was made otherwise: {difference}", hint)


def _is_result(job: Job, identity: str, report: Report) -> bool:
    if report.identity != identity or len(report.bad) > job.max_bad:
        return False
    sizes = {path.name: path.stat().st_size for path in job.output.iterdir()}
    return all(sizes.get(name) == facts.bytes for name, facts in report.files.items())


def _difference(job: Job, report: Report) -> str:
    for name in Recipe.__struct_fields__:
        if getattr(report.recipe, name) != getattr(job.recipe, name):
            return f"its {name} is {getattr(report.recipe, name)}"
    if report.inputs != _given(job):
        return f"its input is {', '.join(report.inputs)}"
    return "an input or the result has changed since, or the input is read in another way"


def _given(job: Job) -> list[str]:
    return [inputs.DATASET + job.dataset] if job.dataset else list(job.inputs)


def _plan(job: Job, source: Inputs, identity: str) -> Plan:
    return Plan(
        identity=identity,
        shards=source.shards,
        recipe=job.recipe,
        json_key=job.json_key,
        text_documents=job.text_documents,
        max_bad=job.max_bad,
        workers=job.workers,
        executor=job.executor,
        folder=_work_folder(job),
    )


def _report(job: Job, identity: str, stages: Stages) -> Report:
    counts, recipe = stages.counts, job.recipe
    return Report(
        primus=primus.__version__,
        identity=identity,
        inputs=_given(job),
        recipe=recipe,
        words=compared.DEFINITION,
        threshold=round(recipe.threshold, 4) if recipe.method == "minhash" else None,
        documents=counts.get("documents", 0),
        kept=counts.get("kept", 0),
        removed_exact=stages.removed_exact,
        removed_near=counts.get("removed", 0) - stages.removed_exact,
        empty=counts.get("empty", 0),
        bad=stages.bad,
        clusters=counts.get("clusters", 0),
        sizes=stages.sizes,
        kept_bytes=counts.get("kept_bytes", 0),
        removed_bytes=counts.get("removed_bytes", 0),
        samples=stages.samples,
    )


def _publish(job: Job, stages: Stages, report: Report, say: Say) -> Deduplicated:
    """Give the files their folder, and remove what they were made from."""
    folder = _work_folder(job)
    with atomic.lock(_lock(job), PUBLISH_TIMEOUT_S, lambda holder: say(f"waiting for {holder} to write {job.output}")):
        if found := _existing(job, report.identity):
            return found
        final = result_folder.new_folder(folder, "final")
        files = result_folder.collect(stages.kept, stages.rows, SUFFIX, final, SUFFIX)
        report = msgspec.structs.replace(report, files=files)
        with atomic.staged({final / REPORT: msgspec.json.format(msgspec.json.encode(report), indent=1)}) as publish:
            publish()
        result_folder.move(final, job.output, folder)
        _tidy(job, report)
    for line in reports.summary(report).splitlines():
        say(line)
    return Deduplicated(job.output, [job.output / name for name in sorted(files)], report, made=True)


def _complete(job: Job, report: Report) -> None:
    """Do what is left where a process was killed after it gave the folder its name."""
    pages = all(report_page(job.output, kind).exists() for kind in ("md", "html"))
    if pages and not _work_folder(job).exists() and not _lock(job).exists():
        return
    with atomic.lock(_lock(job), PUBLISH_TIMEOUT_S):
        _tidy(job, report)


def _tidy(job: Job, report: Report) -> None:
    """Write the pages, and delete what the result was made from; call it with the lock held."""
    pages = {"md": reports.markdown(report), "html": reports.html(report)}
    with atomic.staged({report_page(job.output, kind): page.encode() for kind, page in pages.items()}) as publish:
        publish()
    shutil.rmtree(_work_folder(job), ignore_errors=True)

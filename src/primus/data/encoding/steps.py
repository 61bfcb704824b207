"""What may come before and after tokenizing: text is fetched and cleaned, copies removed, token files verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from primus.data import documents
from primus.data.datasets import hub
from primus.data.encoding import trained
from primus.data.encoding.prepare import Job, Prepared, Say, load_tokenizer
from primus.data.pipeline.workers import Show
from primus.errors import PrimusError, UsageError


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What to do with the text first."""

    clean: str | None = None
    """Recipe of rules by which documents are removed or changed; see `primus.data.cleaning.recipe.load`."""
    dedup: Literal["none", "exact", "minhash"] = "none"
    """Remove documents that repeat earlier ones, exactly or nearly."""
    data_path: Path = Path("data")
    """Folder to which datasets of the hub are fetched."""
    split: str = "train"
    """Of a dataset of the hub."""
    num_samples: int | None = None
    """Take the first documents of a dataset of the hub only."""


def take(steps: Steps, job: Job, say: Say, show: Show) -> Job:
    """The job of tokenizing what the steps leave of the text; what is done already is not done again.

    Raises:
        UsageError: An input is missing or unknown, or cannot be treated so.
        PrimusError: A document is bad, a file damaged, or an output cannot be written.
    """
    is_hub = bool(job.dataset and hub.is_hub(job.dataset))
    if is_hub or steps.clean or steps.dedup != "none":
        _check(steps, job)
    if is_hub:
        job = _fetched(steps, job, say)
    if steps.clean:
        job = _cleaned(steps.clean, job, say, show)
    if steps.dedup != "none":
        job = _unique(steps, job, say, show)
    return job


def verify(made: Sequence[Prepared], say: Say) -> None:
    """Read token files again, and make sure that they are as they were meant.

    Raises:
        PrimusError: They are not.
    """
    from primus.data.verification.verify import Settings
    from primus.data.verification.verify import verify as reports

    for report in reports([each.prefix for each in made], Settings()):
        if report.findings:
            raise PrimusError(
                f"{report.prefix}: {len(report.findings)} findings, first: {report.findings[0]}",
                "make it again with --overwrite; where it repeats, the disk or memory is faulty",
            )
        say(f"{report.prefix}: verified")


def _check(steps: Steps, job: Job) -> None:
    """Find what would only fail in a later step, after hours of another."""
    if steps.clean:
        from primus.data.cleaning.recipe import load

        load(steps.clean)
    if trained.is_trained(job.tokenizer):
        trained.check(job.tokenizer, job.eod)
    else:
        load_tokenizer(job)


def _fetched(steps: Steps, job: Job, say: Say) -> Job:
    from primus.data.datasets import fetch

    assert job.dataset
    request = fetch.Job(
        dataset=job.dataset,
        output=fetch.folder_of(steps.data_path, job.dataset, steps.split),
        split=steps.split,
        num_samples=steps.num_samples,
    )
    done = fetch.fetch(request, say)
    column = done.request.listing.text or documents.text_column(done.files)
    keys = (column,) if job.json_keys == ("text",) else job.json_keys
    return replace(job, dataset=None, inputs=tuple(done.files), json_keys=keys)


def _cleaned(recipe: str, job: Job, say: Say, show: Show) -> Job:
    from primus.data.cleaning.job import Job as CleanJob
    from primus.data.cleaning.job import clean
    from primus.data.cleaning.recipe import load

    request = CleanJob(
        inputs=job.inputs,
        dataset=job.dataset,
        output=job.output.with_name(f"{job.output.name}.clean"),
        recipe=load(recipe),
        json_key=_only_key(job, "--clean"),
        text_documents=job.recipe.text_documents,
        max_bad=job.recipe.max_bad,
        workers=job.workers,
        executor=job.executor,
        existing=_existing(job),
    )
    return replace(job, dataset=None, inputs=tuple(map(str, clean(request, say, show).files)))


def _unique(steps: Steps, job: Job, say: Say, show: Show) -> Job:
    from primus.data.dedup.job import Job as DedupJob
    from primus.data.dedup.job import dedup
    from primus.data.dedup.recipe import Recipe

    assert steps.dedup != "none"
    done = dedup(
        DedupJob(
            inputs=job.inputs,
            dataset=job.dataset,
            output=job.output.with_name(f"{job.output.name}.unique"),
            recipe=Recipe(method=steps.dedup),
            json_key=_only_key(job, "--dedup"),
            text_documents=job.recipe.text_documents,
            max_bad=job.recipe.max_bad,
            workers=job.workers,
            executor=job.executor,
            existing=_existing(job),
        ),
        say,
        show,
    )
    return replace(job, dataset=None, inputs=tuple(map(str, done.files)))


def _only_key(job: Job, option: str) -> str:
    if len(job.json_keys) > 1:
        raise UsageError(f"{option} with several --json-keys", "give one of them")
    return job.json_keys[0]


def _existing(job: Job) -> Literal["check", "replace"]:
    return "replace" if job.existing == "replace" else "check"

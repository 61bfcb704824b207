"""Steps before and after encoding: fetch, clean and deduplicate text, and verify token files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from primus.data import readers
from primus.data.catalog import hub
from primus.data.encode import trained
from primus.data.encode.job import EncodeJob, PreparedTokens, load_job_tokenizer
from primus.data.filter.dedup.recipe import MAX_REMOVED
from primus.data.shards.workers import Show
from primus.errors import PrimusError, UsageError
from primus.messages import Say

if TYPE_CHECKING:
    from primus.data.filter.job import FilterJob, FilterSettings


@dataclass(frozen=True, kw_only=True)
class EncodeSteps:
    """Steps to run before encoding."""

    clean: str | None = None
    """Cleaning recipe; see `primus.data.filter.cleaning.recipe.load_recipe`."""
    dedup: Literal["none", "exact", "minhash"] = "none"
    """Remove exact duplicates, or also near-duplicates."""
    max_removed: float = MAX_REMOVED
    """Largest share of documents that may be removed as near-duplicates: more is an error."""
    data_path: Path = Path("data")
    """Folder for downloaded datasets of the hub."""
    split: str = "train"
    """Split of a dataset of the hub."""
    num_samples: int | None = None
    """Number of documents to take from a dataset of the hub; None for all."""


def run_steps(steps: EncodeSteps, job: EncodeJob, say: Say, show: Show) -> EncodeJob:
    """Run the steps and return the encode job for their output. Completed steps are reused.

    Raises:
        UsageError: An input is missing or unknown, or a step does not support it.
        PrimusError: A document is bad, a file is damaged, or an output cannot be written.
    """
    is_hub = bool(job.dataset and hub.is_hub(job.dataset))
    if is_hub or steps.clean or steps.dedup != "none":
        _check_steps(steps, job)
    # Each step replaces the input of the job with its own output.
    if is_hub:
        job = _fetch_dataset(steps, job, say)
    if steps.clean:
        job = _clean_documents(steps.clean, job, say, show)
    if steps.dedup != "none":
        job = _remove_duplicates(steps, job, say, show)
    return job


def verify_prepared(made: Sequence[PreparedTokens], say: Say) -> None:
    """Read token files again and verify them.

    Raises:
        PrimusError: The verification reports a finding.
    """
    from primus.data.verify.verify import VerifySettings
    from primus.data.verify.verify import verify_token_files as reports

    for report in reports([each.prefix for each in made], VerifySettings()):
        if report.findings:
            raise PrimusError(
                f"{report.prefix}: {len(report.findings)} findings, first: {report.findings[0]}",
                "make it again with --overwrite; if the error repeats, the disk or memory is faulty",
            )
        say(f"{report.prefix}: verified")


def _check_steps(steps: EncodeSteps, job: EncodeJob) -> None:
    """Check the settings of all steps first: a later step would fail only after hours of an earlier one."""
    if steps.clean:
        from primus.data.filter.cleaning.recipe import load_recipe

        load_recipe(steps.clean)
    if trained.is_trained(job.tokenizer):
        trained.check(job.tokenizer, job.eod)
    else:
        load_job_tokenizer(job)


def _fetch_dataset(steps: EncodeSteps, job: EncodeJob, say: Say) -> EncodeJob:
    from primus.data.catalog import dataset_folders, fetch

    assert job.dataset
    request = fetch.FetchJob(
        dataset=job.dataset,
        output=dataset_folders.find_dataset_folder(steps.data_path, job.dataset, steps.split),
        split=steps.split,
        num_samples=steps.num_samples,
    )
    done = fetch.fetch_dataset(request, say)
    column = done.request.listing.text or readers.choose_text_column(done.files)
    keys = (column,) if job.json_keys == ("text",) else job.json_keys
    return replace(job, dataset=None, inputs=tuple(done.files), json_keys=keys)


def _clean_documents(recipe: str, job: EncodeJob, say: Say, show: Show) -> EncodeJob:
    from primus.data.filter.cleaning.job import CleanJob
    from primus.data.filter.cleaning.recipe import load_recipe

    request = CleanJob(recipe=load_recipe(recipe), **_filter_settings(job, "--clean", "clean"))
    return _filter_input(job, request, say, show)


def _remove_duplicates(steps: EncodeSteps, job: EncodeJob, say: Say, show: Show) -> EncodeJob:
    from primus.data.filter.dedup.job import DedupJob
    from primus.data.filter.dedup.recipe import DedupRecipe

    assert steps.dedup != "none"
    recipe, settings = DedupRecipe(method=steps.dedup), _filter_settings(job, "--dedup", "unique")
    return _filter_input(job, DedupJob(recipe=recipe, max_removed=steps.max_removed, **settings), say, show)


def _filter_settings(job: EncodeJob, option: str, suffix: str) -> FilterSettings:
    """Settings of a filter that reads the input of `job` and writes next to its output."""
    return {
        "inputs": job.inputs,
        "dataset": job.dataset,
        "output": job.output.with_name(f"{job.output.name}.{suffix}"),
        "json_key": _only_key(job, option),
        "text_documents": job.recipe.text_documents,
        "max_bad": job.recipe.max_bad,
        "workers": job.workers,
        "executor": job.executor,
        "existing": "replace" if job.existing == "replace" else "check",
    }


def _filter_input(job: EncodeJob, request: FilterJob[Any], say: Say, show: Show) -> EncodeJob:
    from primus.data.filter.result_folder import filter_documents

    return replace(job, dataset=None, inputs=tuple(map(str, filter_documents(request, say, show).files)))


def _only_key(job: EncodeJob, option: str) -> str:
    if len(job.json_keys) > 1:
        raise UsageError(f"{option} with several --json-keys", "give one of them")
    return job.json_keys[0]

"""Remove documents that repeat earlier ones, exactly or nearly (MinHash), with a report and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from primus.data.filter.options import FilterOptions, build_job_settings, check_options
from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.filter.dedup.job import DedupJob
    from primus.data.filter.dedup.report import DedupReport
    from primus.data.filter.result_folder import JobResult


class Options(FilterOptions, frozen=True, kw_only=True):
    """Options of `data dedup`."""

    method: Literal["exact", "minhash"] = "minhash"
    """Remove equal documents only, or near copies too."""
    bands: Annotated[int, Meta(ge=1)] = 14
    """Bands of the MinHash signature: documents that agree in one are copies."""
    rows: Annotated[int, Meta(ge=1)] = 8
    """Hashes in a band; more of them find only what is more alike."""
    ngram: Annotated[int, Meta(ge=1)] = 5
    """Words of a shingle."""
    seed: Annotated[int, Meta(ge=0)] = 1
    """Of the hash functions."""
    normalize: bool = False
    """With the exact method: compare without case, accents, punctuation and spacing, and take any number as 0."""
    normalize_numbers: bool = True
    """Where words are compared, take any number as 0, also within a word, as datatrove does."""


def run(options: Options, context: TaskContext) -> None:
    """Remove copies and tell how many there were.

    Raises:
        PrimusError: See `primus.data.filter.result_folder.filter_documents`.
    """
    job = _build_dedup_job(options)
    from primus.data.filter.result_folder import filter_documents
    from primus.data.shards.display import ProgressDisplay

    with ProgressDisplay() as display:
        done = filter_documents(job, display.print_line, display.show_progress)
    value = _summarize_dedup(job, done)
    context.result(value, "\n".join(f"{name:17} {each}" for name, each in value.items()))


def _build_dedup_job(options: Options) -> DedupJob:
    """The job that the options describe.

    Raises:
        UsageError: Something is missing or unknown.
    """
    check_options(options, "dedup")
    if not options.normalize_numbers and options.method == "exact" and not options.normalize:
        raise UsageError(
            "--no-normalize-numbers with --method exact", "leave it out: equal texts have equal numbers; or --normalize"
        )
    if options.normalize and options.method != "exact":
        raise UsageError(
            "--normalize with --method minhash", "leave it out: MinHash always compares words without case and spacing"
        )
    from primus.data.filter.dedup.job import DedupJob
    from primus.data.filter.dedup.recipe import DedupRecipe

    recipe = DedupRecipe(**{name: getattr(options, name) for name in DedupRecipe.__struct_fields__})
    return DedupJob(recipe=recipe, **build_job_settings(options))


def _summarize_dedup(job: DedupJob, done: JobResult[DedupReport]) -> dict[str, object]:
    report = done.report
    return {
        "folder": str(done.folder),
        "made": done.made,
        "documents": report.documents,
        "kept": report.kept,
        "removed_exact": report.removed_exact,
        "removed_near": report.removed_near,
        "clusters": report.clusters,
        "empty_documents": report.empty,
        "bad_documents": len(report.bad),
        "large_clusters": len(report.large),
        "threshold": report.threshold,
        "report": str(done.folder / job.report_name),
        "page": str(job.page_path()),
    }

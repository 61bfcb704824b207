"""Remove exact duplicates and near-duplicates (MinHash), with a report and samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from primus.data.filter.dedup.recipe import MAX_REMOVED, DedupRecipe
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
    """Remove exact duplicates only, or near-duplicates too."""
    bands: Annotated[int, Meta(ge=1)] = 14
    """Number of bands of the MinHash signature; documents that share a band are duplicates."""
    rows: Annotated[int, Meta(ge=1)] = 8
    """Number of hashes in a band; more hashes raise the similarity threshold."""
    ngram: Annotated[int, Meta(ge=1)] = 5
    """Number of words in a shingle."""
    seed: Annotated[int, Meta(ge=0)] = 1
    """Seed of the hash functions."""
    normalize: bool = False
    """With --method exact: ignore case, accents, punctuation, spacing and the values of numbers."""
    max_removed: Annotated[float, Meta(ge=0, le=1)] = MAX_REMOVED
    """Largest share of documents to remove as near-duplicates; more is an error before anything is written."""
    normalize_numbers: bool = True
    """Ignore the values of numbers when words are compared, also within a word, as datatrove does."""


def run(options: Options, context: TaskContext) -> None:
    """Remove duplicates and print the counts.

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
            "--no-normalize-numbers with --method exact", "remove it: equal texts have equal numbers; or --normalize"
        )
    if options.normalize and options.method != "exact":
        raise UsageError(
            "--normalize with --method minhash", "remove it: MinHash always compares words without case and spacing"
        )
    from primus.data.filter.dedup.job import DedupJob

    recipe = DedupRecipe(**{name: getattr(options, name) for name in DedupRecipe.__struct_fields__})
    return DedupJob(recipe=recipe, max_removed=options.max_removed, **build_job_settings(options))


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

"""Removal of repeated documents from end to end: hash, match, cluster, write; whatever is interrupted goes on.

done = dedup(Job(inputs=("corpus/*.jsonl",), output=Path("out/unique")), say, show)
done.files, done.report.kept
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import primus
from primus.data.filter import result_folder
from primus.data.filter.dedup import normalized_words, pipeline
from primus.data.filter.dedup import report as reports
from primus.data.filter.dedup.pipeline import DedupPlan, DedupResult
from primus.data.filter.dedup.recipe import VERSION, DedupRecipe
from primus.data.filter.dedup.report import DedupReport
from primus.data.filter.job import Say, TextJob
from primus.data.filter.result_folder import JobResult, ResultCollector, ResultFolder
from primus.data.shards.document_writer import SUFFIX
from primus.data.shards.inputs import Inputs
from primus.data.shards.workers import Show

REPORT = "dedup.json"


@dataclass(frozen=True, kw_only=True)
class DedupJob(TextJob):
    """What to deduplicate, and where to."""

    recipe: DedupRecipe = field(default_factory=DedupRecipe)
    """What counts as a repetition."""


def deduplicate_documents(
    job: DedupJob, say: Say = lambda text: None, show: Show = lambda progress: None
) -> JobResult[DedupReport]:
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
    job.recipe.check()
    source = job.open()
    result = ResultFolder(
        job=job,
        source=source,
        settings=[VERSION, job.recipe, job.json_key, job.text_documents],
        report_name=REPORT,
        report_type=DedupReport,
        difference=lambda report: _describe_difference(job, report),
        pages=lambda report: {"md": reports.format_markdown(report), "html": reports.format_html(report)},
    )

    def make() -> ResultCollector[DedupReport]:
        stages = pipeline.run(_build_plan(job, source, result), show)
        source.check_unchanged()
        return lambda: _collect_result(job, source, result.identity, stages)

    done = result.get(make, say)
    for line in reports.format_summary(done.report).splitlines() if done.made else reports.list_warnings(done.report):
        say(line)
    return done


def _describe_difference(job: DedupJob, report: DedupReport) -> str | None:
    for name in DedupRecipe.__struct_fields__:
        if getattr(report.recipe, name) != getattr(job.recipe, name):
            return f"its {name} is {getattr(report.recipe, name)}"
    return None


def _build_plan(job: DedupJob, source: Inputs, result: ResultFolder[DedupReport]) -> DedupPlan:
    return DedupPlan(
        job=job,
        recipe=job.recipe,
        identity=f"{result.identity} {source.identity}",
        shards=source.shards,
        folder=result.work,
    )


def _collect_result(
    job: DedupJob, source: Inputs, identity: str, stages: DedupResult
) -> tuple[DedupReport, dict[Path, Path]]:
    folder, files = result_folder.collect_files(stages.kept, stages.rows, SUFFIX, "final", SUFFIX)
    return msgspec.structs.replace(_build_report(job, source, identity, stages), files=files), {job.output: folder}


def _build_report(job: DedupJob, source: Inputs, identity: str, stages: DedupResult) -> DedupReport:
    counts, recipe = stages.counts, job.recipe
    return DedupReport(
        primus=primus.__version__,
        identity=identity,
        inputs=source.collect_facts(stages.contents),
        recipe=recipe,
        words=normalized_words.DEFINITION,
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
        large=stages.large,
    )

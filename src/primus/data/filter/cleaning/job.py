"""Cleaning of documents from end to end: read, judge, write, report; whatever is interrupted goes on.

cleaned = clean(Job(inputs=("corpus/*.jsonl",), output=Path("out/clean"), recipe=recipe.load("fineweb")), say, show)
cleaned.files, cleaned.report.kept
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import primus
from primus.data.filter import result_folder
from primus.data.filter.cleaning import recipe as recipes
from primus.data.filter.cleaning import report as reports
from primus.data.filter.cleaning.recipe import CleaningRecipe
from primus.data.filter.cleaning.report import CleanReport, RemovedSample, RuleRemovals
from primus.data.filter.cleaning.stage import CleanStage, Compression, file_suffix
from primus.data.filter.job import Say, TextJob
from primus.data.filter.result_folder import FinishedElsewhere, JobResult, ResultCollector, ResultFolder
from primus.data.megatron.manifest import FileFacts
from primus.data.shards import executors
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import ShardQueue, ShardResult, open_shard_queue
from primus.data.shards.workers import Show

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class CleanJob(TextJob):
    """What to clean, how, and where to."""

    recipe: CleaningRecipe
    """Rules and thresholds; see `primus.data.filter.cleaning.recipe.load_recipe`."""
    compression: Compression = "zst"
    """Of the files that are written."""
    keep_removed: bool = False
    """Write what is removed too, with the reason, into ``OUTPUT.removed``: no folder that another step may read."""


def clean_documents(
    job: CleanJob, say: Say = lambda text: None, show: Show = lambda progress: None
) -> JobResult[CleanReport]:
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
    source = job.open()
    settings = _build_settings(job)
    result = ResultFolder(
        job=job,
        source=source,
        settings=settings,
        report_name=MANIFEST,
        report_type=CleanReport,
        is_whole=lambda report: result_folder.has_files(removed_folder(job.output), report.removed_files),
        difference=lambda report: _describe_difference(job, report),
        pages=lambda report: {"md": reports.format_markdown(report), "html": reports.format_html(report)},
    )

    def make() -> ResultCollector[CleanReport]:
        job.recipe.start()
        identity = [settings, source.identity]
        stage = CleanStage(identity, job.recipe, job.json_key, job.text_documents, job.compression, job.keep_removed)
        board = open_shard_queue(stage, source.shards, result.work, job.max_bad, job.output)
        rows = executors.run(board, job.executor, job.workers, "cleaning", show)
        if len(rows) < len(source.shards):
            raise FinishedElsewhere
        source.check_unchanged()
        return lambda: _collect_result(job, source, result.identity, board, rows)

    done = result.get(make, say)
    if done.made:
        for line in reports.format_summary(done.report).splitlines():
            say(line)
    return done


def removed_folder(output: Path) -> Path:
    """Where what was removed is."""
    return output.with_name(f"{output.name}.removed")


def _build_settings(job: CleanJob) -> dict[str, object]:
    return {
        "recipe": job.recipe.content(),
        "json_key": job.json_key,
        "text_documents": job.text_documents,
        "compression": job.compression,
        "keep_removed": job.keep_removed,
    }


def _describe_difference(job: CleanJob, report: CleanReport) -> str | None:
    if report.fingerprint != job.recipe.fingerprint():
        return f"by recipe {report.recipe}, or another version of it"
    return None


def _collect_result(
    job: CleanJob, source: Inputs, identity: str, board: ShardQueue, rows: Sequence[ShardResult]
) -> tuple[CleanReport, dict[Path, Path]]:
    ending = file_suffix(job.compression)
    folders: dict[Path, Path] = {}
    removed_files: dict[str, FileFacts] = {}
    if job.keep_removed:
        removed, removed_files = result_folder.collect_files(board, rows, f"removed.{ending}", "removed", ending)
        folders[removed_folder(job.output)] = removed
    folders[job.output], files = result_folder.collect_files(board, rows, ending, "final", ending)
    report = _build_report(job, source, identity, rows)
    return msgspec.structs.replace(report, files=files, removed_files=removed_files), folders


def _build_report(job: CleanJob, source: Inputs, identity: str, rows: Sequence[ShardResult]) -> CleanReport:
    counts, edits = Counter[str](), Counter[str]()
    for row in rows:
        counts.update(row.counts)
        edits.update(row.facts["edits"])
    removed = [msgspec.convert(row.facts["removed"], list[RuleRemovals]) for row in rows]
    samples = [sample for row in rows for sample in msgspec.convert(row.facts["samples"], list[RemovedSample])]
    return CleanReport(
        version=recipes.VERSION,
        primus=primus.__version__,
        identity=identity,
        inputs=source.collect_facts([row.facts["contents"] for row in rows]),
        recipe=job.recipe.name,
        fingerprint=job.recipe.fingerprint(),
        content=job.recipe.content(),
        documents=counts["documents"],
        kept=counts["kept"],
        characters=counts["characters"],
        kept_characters=counts["kept_characters"],
        kept_words=counts["kept_words"],
        empty=counts["empty"],
        bad=[item for row in rows for item in row.bad],
        removed=reports.add_removed([rule.name for rule in job.recipe.rules], removed),
        edits=dict(sorted(edits.items())),
        samples=reports.choose_samples(samples),
    )

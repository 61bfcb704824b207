"""Cleans documents by rules.

cleaned = filter_documents(CleanJob(inputs=("corpus/*.jsonl",), output=Path("clean"), recipe=load_recipe("fineweb")))
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
from primus.data.filter.cleaning.report import CleanReport
from primus.data.filter.cleaning.stage import CleanFacts, CleanStage, Compression, file_suffix
from primus.data.filter.job import FilterJob, FinishedElsewhere, ResultCollector
from primus.data.megatron.manifest import FileFacts
from primus.data.shards import executors
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import ShardQueue, ShardResult, open_shard_queue
from primus.data.shards.workers import Show


@dataclass(frozen=True, kw_only=True)
class CleanJob(FilterJob[CleanReport]):
    """Removes documents by rules, and writes the others with the changes of the rules."""

    report_type = CleanReport
    report_name = "manifest.json"

    recipe: CleaningRecipe
    """Rules and thresholds; see `primus.data.filter.cleaning.recipe.load_recipe`."""
    compression: Compression = "zst"
    """Compression of the written files."""
    keep_removed: bool = False
    """Also write the removed documents, each with its reason, into ``OUTPUT.removed``. The folder lies outside the
    output, so that a later step that reads the output does not read them."""

    def collect_settings(self) -> dict[str, object]:
        """All settings that change the result, as JSON."""
        return {
            "recipe": self.recipe.content(),
            "json_key": self.json_key,
            "text_documents": self.text_documents,
            "compression": self.compression,
            "keep_removed": self.keep_removed,
        }

    def describe_difference(self, report: CleanReport) -> str | None:
        """Describe the difference if an existing result was made with another recipe."""
        if report.fingerprint != self.recipe.fingerprint():
            return f"it was made by recipe {report.recipe}, or another version of it"
        return None

    def is_complete(self, report: CleanReport) -> bool:
        """Whether the files of removed documents exist."""
        return result_folder.has_files(removed_folder(self.output), report.removed_files)

    def run_stages(self, source: Inputs, work: Path, identity: str, show: Show) -> ResultCollector[CleanReport]:
        """Clean every shard."""
        self.recipe.start()
        settings = [self.collect_settings(), source.identity]
        stage = CleanStage(
            settings, self.recipe, self.json_key, self.text_documents, self.compression, self.keep_removed
        )
        queue = open_shard_queue(stage, source.shards, work, self.max_bad, self.output)
        results = executors.run(queue, self.executor, self.workers, "cleaning", show)
        # Missing results mean that another process has published the output and removed the queue.
        if len(results) < len(source.shards):
            raise FinishedElsewhere
        return lambda: _collect_result(self, source, identity, queue, results)


def removed_folder(output: Path) -> Path:
    """Folder of the removed documents."""
    return output.with_name(f"{output.name}.removed")


def _collect_result(
    job: CleanJob, source: Inputs, identity: str, queue: ShardQueue, results: Sequence[ShardResult]
) -> tuple[CleanReport, dict[Path, Path]]:
    ending = file_suffix(job.compression)
    folders: dict[Path, Path] = {}
    removed_files: dict[str, FileFacts] = {}
    if job.keep_removed:
        removed, removed_files = result_folder.collect_files(queue, results, f"removed.{ending}", "removed", ending)
        folders[removed_folder(job.output)] = removed
    folders[job.output], files = result_folder.collect_files(queue, results, ending, "final", ending)
    report = _build_report(job, source, identity, results)
    return msgspec.structs.replace(report, files=files, removed_files=removed_files), folders


def _build_report(job: CleanJob, source: Inputs, identity: str, results: Sequence[ShardResult]) -> CleanReport:
    counts, edits = Counter[str](), Counter[str]()
    for result in results:
        counts.update(result.counts)
    facts = [result.read_facts(CleanFacts) for result in results]
    for each in facts:
        edits.update(each.edits)
    return CleanReport(
        version=recipes.VERSION,
        primus=primus.__version__,
        identity=identity,
        inputs=source.collect_facts([each.contents for each in facts]),
        recipe=job.recipe.name,
        fingerprint=job.recipe.fingerprint(),
        content=job.recipe.content(),
        documents=counts["documents"],
        kept=counts["kept"],
        characters=counts["characters"],
        kept_characters=counts["kept_characters"],
        kept_words=counts["kept_words"],
        empty=counts["empty"],
        bad=[item for result in results for item in result.bad],
        removed=reports.add_removed([rule.name for rule in job.recipe.rules], [each.removed for each in facts]),
        edits=dict(sorted(edits.items())),
        samples=reports.choose_samples(sample for each in facts for sample in each.samples),
    )

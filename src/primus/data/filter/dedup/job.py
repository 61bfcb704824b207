"""Removes duplicates: hash, match, cluster, write.

done = filter_documents(DedupJob(inputs=("corpus/*.jsonl",), output=Path("out/unique")))
done.files, done.report.kept
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import primus
from primus.data.filter import result_folder
from primus.data.filter.dedup import normalized_words, pipeline
from primus.data.filter.dedup.pipeline import DedupPlan, DedupResult
from primus.data.filter.dedup.recipe import MAX_REMOVED, VERSION, DedupRecipe
from primus.data.filter.dedup.report import DedupReport
from primus.data.filter.job import FilterJob, ResultCollector
from primus.data.shards.document_writer import SUFFIX
from primus.data.shards.inputs import Inputs
from primus.data.shards.workers import Show


@dataclass(frozen=True, kw_only=True)
class DedupJob(FilterJob[DedupReport]):
    """Removes duplicates. Of similar documents, the first in the order of the input is kept."""

    report_type = DedupReport
    report_name = "dedup.json"

    recipe: DedupRecipe = field(default_factory=DedupRecipe)
    """Definition of duplicates."""
    max_removed: float = MAX_REMOVED
    """Largest share of documents that may be removed as near-duplicates: more is an error."""

    def open_input(self) -> Inputs:
        """Check the recipe and open the input."""
        self.recipe.check()
        return super().open_input()

    def collect_settings(self) -> list[object]:
        """All settings that change the result, as JSON."""
        return [VERSION, self.recipe, self.json_key, self.text_documents]

    def describe_difference(self, report: DedupReport) -> str | None:
        """Describe the first setting that differs from that of an existing result."""
        for name in DedupRecipe.__struct_fields__:
            if getattr(report.recipe, name) != getattr(self.recipe, name):
                return f"its {name} is {getattr(report.recipe, name)}"
        return None

    def run_stages(self, source: Inputs, work: Path, identity: str, show: Show) -> ResultCollector[DedupReport]:
        """Hash, match and cluster all documents, and write the kept ones."""
        plan = DedupPlan(
            job=self,
            recipe=self.recipe,
            identity=f"{identity} {source.identity}",
            shards=source.shards,
            folder=work,
            max_removed=self.max_removed,
        )
        stages = pipeline.run(plan, show)
        return lambda: _collect_result(self, source, identity, stages)


def _collect_result(
    job: DedupJob, source: Inputs, identity: str, stages: DedupResult
) -> tuple[DedupReport, dict[Path, Path]]:
    folder, files = result_folder.collect_files(stages.kept, stages.results, SUFFIX, "final", SUFFIX)
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

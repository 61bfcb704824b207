"""Removal of repeated documents from end to end: hash, match, cluster, write; whatever is interrupted goes on.

done = dedup(Job(inputs=("corpus/*.jsonl",), output=Path("out/unique")), say, show)
done.files, done.report.kept
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import primus
from primus.data.dedup import compared, pipeline
from primus.data.dedup import report as reports
from primus.data.dedup.pipeline import Plan, Stages
from primus.data.dedup.recipe import VERSION, Recipe
from primus.data.dedup.report import Report
from primus.data.pipeline import result_folder
from primus.data.pipeline.document_writer import SUFFIX
from primus.data.pipeline.inputs import Inputs
from primus.data.pipeline.result_folder import Collect, Made, ResultFolder
from primus.data.pipeline.text_job import Say, TextJob
from primus.data.pipeline.workers import Show

REPORT = "dedup.json"


@dataclass(frozen=True, kw_only=True)
class Job(TextJob):
    """What to deduplicate, and where to."""

    recipe: Recipe = field(default_factory=Recipe)
    """What counts as a repetition."""


def dedup(job: Job, say: Say = lambda text: None, show: Show = lambda progress: None) -> Made[Report]:
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
        report_type=Report,
        difference=lambda report: _difference(job, report),
        pages=lambda report: {"md": reports.markdown(report), "html": reports.html(report)},
    )

    def make() -> Collect[Report]:
        stages = pipeline.run(_plan(job, source, result), show)
        source.check_unchanged()
        return lambda: _collect(job, source, result.identity, stages)

    done = result.get(make, say)
    for line in reports.summary(done.report).splitlines() if done.made else reports.warnings(done.report):
        say(line)
    return done


def _difference(job: Job, report: Report) -> str | None:
    for name in Recipe.__struct_fields__:
        if getattr(report.recipe, name) != getattr(job.recipe, name):
            return f"its {name} is {getattr(report.recipe, name)}"
    return None


def _plan(job: Job, source: Inputs, result: ResultFolder[Report]) -> Plan:
    return Plan(
        job=job,
        recipe=job.recipe,
        identity=f"{result.identity} {source.identity}",
        shards=source.shards,
        folder=result.work,
    )


def _collect(job: Job, source: Inputs, identity: str, stages: Stages) -> tuple[Report, dict[Path, Path]]:
    folder, files = result_folder.collect(stages.kept, stages.rows, SUFFIX, "final", SUFFIX)
    return msgspec.structs.replace(_report(job, source, identity, stages), files=files), {job.output: folder}


def _report(job: Job, source: Inputs, identity: str, stages: Stages) -> Report:
    counts, recipe = stages.counts, job.recipe
    return Report(
        primus=primus.__version__,
        identity=identity,
        inputs=source.facts(stages.contents),
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
        large=stages.large,
    )

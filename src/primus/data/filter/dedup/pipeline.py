"""Runs the four stages in sequence: keys, pairs, clusters, documents; each with any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from primus.data.filter.dedup import key_files, keys, matches, report, stages
from primus.data.filter.dedup.recipe import DedupRecipe
from primus.data.filter.dedup.report import DedupReport, DuplicateSample, LargeCluster
from primus.data.filter.job import FilterJob, FinishedElsewhere
from primus.data.readers.shard import Shard
from primus.data.shards import executors, shard_queue
from primus.data.shards.shard_queue import BadItem, ShardQueue, ShardResult, Stage
from primus.data.shards.workers import Show
from primus.errors import PrimusError
from primus.process import count_usable_cpus


@dataclass(frozen=True, kw_only=True)
class DedupPlan:
    """Settings of the stages."""

    job: FilterJob[DedupReport]
    """Input, output and processes."""
    recipe: DedupRecipe
    """Definition of duplicates."""
    identity: str
    """Hash of input and settings."""
    shards: Sequence[Shard]
    """Shards of the input."""
    folder: Path
    """Folder for intermediate files."""
    max_removed: float = 1.0
    """Largest share of documents that may be removed as near-duplicates."""

    @property
    def num_bands(self) -> int:
        """Number of bands, in addition to the exact hashes."""
        return self.recipe.bands if self.recipe.method == "minhash" else 0


@dataclass(frozen=True, kw_only=True)
class DedupResult:
    """Result of the stages."""

    kept: ShardQueue
    """Queue with the files of the kept documents."""
    results: list[ShardResult]
    """Results of its shards."""
    counts: dict[str, int]
    """Sums over all stages."""
    removed_exact: int
    """Documents that equal an earlier one."""
    sizes: list[tuple[int, int]]
    """Sizes of clusters, each with the number of clusters."""
    samples: list[DuplicateSample]
    large: list[LargeCluster]
    """Clusters of more than a tenth of the documents."""
    bad: list[BadItem]
    contents: list[list[str]]
    """Checksums of each shard of the input; see `primus.data.shards.inputs.hash_contents`."""


@dataclass(frozen=True)
class _StageResult:
    queue: ShardQueue
    results: list[ShardResult]

    def list_files(self, suffix: str) -> list[Path]:
        return [self.queue.result_file(result, suffix) for result in self.results]


def run(plan: DedupPlan, show: Show) -> DedupResult:
    """Run the stages that are not complete.

    Raises:
        FinishedElsewhere: Another process has finished the job.
        PrimusError: Too many documents are bad or near-duplicates, or a file cannot be read or written.
    """
    key_stage = keys.KeyStage(["keys", plan.identity], plan.recipe, plan.job.json_key, plan.job.text_documents)
    hashed = _run_stage(plan, key_stage, plan.shards, "hashing", show)
    # Documents are numbered in the order of the input, so that the smallest number in a cluster is the first document.
    begin = [0, *accumulate(result.counts.get("documents", 0) for result in hashed.results)]
    matched, ranges = _match_bands(plan, hashed, begin, show)
    paths = matched.list_files(stages.PAIRS)
    first_exact = plan.num_bands * ranges
    cluster_stage = stages.ClusterStage(
        ["clusters", plan.identity], begin[-1], paths[:first_exact], paths[first_exact:]
    )
    whole = [Shard(0, (), begin[-1] * 8)]
    clustered = _run_stage(plan, cluster_stage, whole, "clustering", show)
    clusters = clustered.results[0].read_facts(stages.ClusterFacts)
    removed_exact = sum(result.counts.get("pairs", 0) for result in matched.results[first_exact:])
    _check_removed(plan, begin[-1], clustered.results[0].counts.get("removed", 0) - removed_exact)
    keep_stage = stages.KeepStage(
        ["documents", plan.identity],
        plan.recipe,
        plan.job.json_key,
        plan.job.text_documents,
        clustered.list_files(stages.FIRSTS)[0],
        begin,
        clusters.list_samples(),
    )
    kept = _run_stage(plan, keep_stage, plan.shards, "writing", show)
    described = {
        number: each for result in kept.results for number, each in result.read_facts(stages.KeepFacts).samples.items()
    }
    return DedupResult(
        kept=kept.queue,
        results=kept.results,
        counts=_sum_counts(result for done in (hashed, clustered, kept) for result in done.results),
        removed_exact=removed_exact,
        sizes=clusters.sizes,
        samples=[report.build_sample(described[first], described[removed]) for first, removed in clusters.samples],
        large=[
            report.build_large_cluster(size, size / begin[-1], described[first], described[removed])
            for first, size, removed in clusters.large
        ],
        bad=[item for result in hashed.results for item in result.bad],
        contents=[result.read_facts(keys.KeyFacts).contents for result in hashed.results],
    )


def _check_removed(plan: DedupPlan, num_documents: int, num_near: int) -> None:
    """Refuse to remove most of the input, before a document is written; the work so far is kept.

    Raises:
        PrimusError: More near-duplicates are found than are allowed.
    """
    if num_near < stages.FEWEST_OF_LARGE or num_near <= plan.max_removed * num_documents:
        return
    numbers = "; numbers compare as equal, `data dedup --no-normalize-numbers` compares their values"
    raise PrimusError(
        f"{num_near:,} of {num_documents:,} documents ({num_near / num_documents:.0%}) would be removed as"
        f" near-duplicates, more than the share {plan.max_removed:g}{numbers if plan.recipe.normalize_numbers else ''}",
        "--max-removed 1 removes them, and the report shows samples; `data dedup --method exact` and"
        " `data prepare --dedup exact` remove equal texts",
    )


def _match_bands(plan: DedupPlan, hashed: _StageResult, begin: list[int], show: Show) -> tuple[_StageResult, int]:
    """Match the keys of each band; returns the result, and the number of ranges of keys for each band."""
    ranges = matches.choose_num_ranges(begin[-1])
    files = [
        key_files.KeyFile(path, result.read_facts(keys.KeyFacts).blocks, first, plan.num_bands)
        for path, result, first in zip(hashed.list_files(keys.SUFFIX), hashed.results, begin, strict=False)
    ]
    stage = stages.MatchStage(["pairs", plan.identity], files, ranges)
    return _run_stage(
        plan, stage, stages.list_match_shards(plan.num_bands, ranges, begin[-1]), "matching", show
    ), ranges


def _run_stage(plan: DedupPlan, stage: Stage, shards: Sequence[Shard], name: str, show: Show) -> _StageResult:
    job = plan.job
    queue = shard_queue.open_shard_queue(stage, shards, plan.folder, job.max_bad, job.output)
    count = count_usable_cpus() if job.workers is None else job.workers
    here = job.executor == "local" and min(count, len(shards)) == 1
    results = executors.run(queue, job.executor, 0 if here else job.workers, name, show)
    # Missing results mean that another process has published the output and removed the queue.
    if len(results) < len(shards):
        raise FinishedElsewhere
    return _StageResult(queue, results)


def _sum_counts(results: Iterator[ShardResult]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for result in results:
        for name, amount in result.counts.items():
            sums[name] = sums.get(name, 0) + amount
    return sums

"""MLPerf's check that runs do not converge faster than the reference, which would be another training.

Source: training_rules.adoc of mlcommons/training_policies, and rcp_checker of mlcommons/logging. Means are olympic: the
smallest and the largest count are dropped. The limit is that of a one-sided t-test of two samples with equal
deviations: a mean below it is significantly smaller than that of the reference, at a level of 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

import msgspec
from msgspec import Struct, field

from primus.errors import PrimusError, UsageError
from primus.statistics import compute_t_quantile
from primus.training_logs.formats.mlperf import TOKEN, read_mlperf_line
from primus.training_logs.line_values import LogLineError
from primus.training_logs.log_stream import open_log, split_blocks

LEVEL = 0.05
MOST_FAILED = 1
"""A second run that does not converge voids the result; one counts as the slowest."""


class ReferencePoint(Struct, frozen=True, kw_only=True):
    """Counts (samples or epochs) that the reference needs to converge with one batch size."""

    batch_size: float
    mean: float
    """Olympic mean of the counts."""
    deviation: float
    """Standard deviation of the counts that the mean keeps."""
    num_counts: int
    """Number of counts that the mean keeps."""


class ConvergenceCheck(Struct, frozen=True, kw_only=True):
    """The comparison of some runs with the reference."""

    passes: bool
    reason: str
    batch_size: float
    mean: float | None = None
    """Olympic mean of the runs."""
    limit: float | None = None
    """Smallest mean that passes."""
    reference: ReferencePoint | None = None
    normalization: float | None = None
    """Factor of the time to train, at least 1: runs that are faster than the mean of the reference by luck."""


class ConvergedRun(Struct, frozen=True, kw_only=True):
    """When one run converged."""

    log: str
    benchmark: str
    batch_size: float
    count: float
    """Samples at the evaluation that ended the run; infinite if it did not converge."""


def compute_reference_point(batch_size: float, counts: Sequence[float]) -> ReferencePoint:
    """The point of a batch size.

    Raises:
        UsageError: There are less than three counts.
    """
    if len(counts) < 3:
        raise UsageError(f"the reference has {len(counts)} counts for batch size {batch_size:g}; the mean needs three")
    kept = _drop_extremes(counts)
    return ReferencePoint(batch_size=batch_size, mean=fmean(kept), deviation=pstdev(kept), num_counts=len(kept))


def compute_limit(reference: ReferencePoint, num_counts: int) -> float:
    """The smallest mean of `num_counts` counts that is not significantly below the reference."""
    sizes = (reference.num_counts, num_counts)
    quantile = compute_t_quantile(1 - LEVEL, sum(sizes) - 2)
    return reference.mean - quantile * reference.deviation * math.sqrt(sum(1 / size for size in sizes))


def check_convergence(
    counts: Sequence[float], batch_size: float, references: Sequence[ReferencePoint]
) -> ConvergenceCheck:
    """Compare the counts of some runs with the point of their batch size, or one between two others.

    Args:
        counts: Of three or more runs; infinite for one that did not converge.
        batch_size: Global batch size of the runs.
        references: Points of the reference.
    """
    failed = sum(math.isinf(count) for count in counts)
    if failed > MOST_FAILED:
        return ConvergenceCheck(passes=False, reason=f"{failed} runs did not converge", batch_size=batch_size)
    if len(counts) < 3:
        reason = f"{len(counts)} runs: the mean without the extremes needs three"
        return ConvergenceCheck(passes=False, reason=reason, batch_size=batch_size)
    reference, origin = _find_point(batch_size, references)
    if reference is None:
        return ConvergenceCheck(passes=False, reason=origin, batch_size=batch_size)
    kept = _drop_extremes(counts)
    mean, limit = fmean(kept), compute_limit(reference, len(kept))
    verdict = "not faster than the reference" if mean >= limit else "significantly faster than the reference"
    return ConvergenceCheck(
        passes=mean >= limit,
        reason=f"{verdict} ({origin})",
        batch_size=batch_size,
        mean=mean,
        limit=limit,
        reference=reference,
        normalization=max(1.0, reference.mean / mean),
    )


class ReferenceRecord(Struct, frozen=True):
    """A record of a file of rcp_checker."""

    benchmark: str = field(name="Benchmark")
    batch_size: float = field(name="BS")
    samples: list[float] | None = field(default=None, name="samples to converge")
    epochs: list[float] | None = field(default=None, name="Epochs to converge")


def read_references(path: Path, benchmark: str) -> list[ReferencePoint]:
    """The points of a benchmark in a file of rcp_checker (`rcps_llama31_8b.json`).

    Raises:
        UsageError: It is not such a file, or of another benchmark.
    """
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, ReferenceRecord])
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a file of reference convergence points: {error}") from None
    records = [record for record in tree.values() if record.benchmark == benchmark]
    if not records:
        found = sorted({record.benchmark for record in tree.values()})
        raise UsageError(f"{path}: no reference points of {benchmark}", f"it contains those of: {', '.join(found)}")
    return sorted(
        (compute_reference_point(record.batch_size, _find_counts(record, path)) for record in records),
        key=lambda point: point.batch_size,
    )


def read_converged_run(path: Path) -> ConvergedRun:
    """When the run of an MLPerf log converged: the last evaluation before a `run_stop` with the status success.

    Raises:
        UsageError: It is not the log of a whole run.
    """
    benchmark, batch_size, count, status = "", math.nan, math.inf, ""
    try:
        with open_log(path) as file:
            for block, _ in split_blocks(file):
                for line in block.split(b"\n"):
                    if TOKEN not in line:
                        continue
                    found = read_mlperf_line(line)
                    if found.key == "submission_benchmark":
                        benchmark = str(found.value)
                    elif found.key == "global_batch_size":
                        batch_size = float(found.value)
                    elif found.key == "eval_accuracy":
                        number = found.find_number("samples_count", "epoch_num")
                        count = math.nan if number is None else number
                    elif found.key == "run_stop":
                        status = str(found.metadata.get("status"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (LogLineError, TypeError, ValueError) as error:
        raise PrimusError(f"{path}: damaged: {error}") from None
    if not benchmark or math.isnan(batch_size):
        raise UsageError(f"{path}: not an MLPerf log of a run", "it has no submission_benchmark or global_batch_size")
    converged = status == "success" and math.isfinite(count)
    return ConvergedRun(
        log=str(path), benchmark=benchmark, batch_size=batch_size, count=count if converged else math.inf
    )


def _find_point(
    batch_size: float, references: Sequence[ReferencePoint]
) -> tuple[ReferencePoint | None, Literal["reference of this batch size"] | str]:
    exact = next((point for point in references if point.batch_size == batch_size), None)
    if exact is not None:
        return exact, "reference of this batch size"
    below = max((point for point in references if point.batch_size < batch_size), key=_get_size, default=None)
    above = min((point for point in references if point.batch_size > batch_size), key=_get_size, default=None)
    if above is None:
        return None, f"no reference for batch size {batch_size:g} or above it: runs of the reference are needed"
    if below is None:
        return above, f"the smallest batch size of the reference, {above.batch_size:g}"
    share = (batch_size - below.batch_size) / (above.batch_size - below.batch_size)
    point = ReferencePoint(
        batch_size=batch_size,
        mean=below.mean + share * (above.mean - below.mean),
        deviation=below.deviation + share * (above.deviation - below.deviation),
        num_counts=min(below.num_counts, above.num_counts),
    )
    return point, f"between the references of {below.batch_size:g} and {above.batch_size:g}"


def _get_size(point: ReferencePoint) -> float:
    return point.batch_size


def _drop_extremes(counts: Sequence[float]) -> list[float]:
    return sorted(counts)[1:-1]


def _find_counts(record: ReferenceRecord, path: Path) -> list[float]:
    counts = record.epochs if record.samples is None else record.samples
    if counts is None:
        raise UsageError(f"{path}: a record without counts", "it needs 'Epochs to converge'")
    return counts

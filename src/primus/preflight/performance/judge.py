"""Judge the measured performance of nodes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from primus.errors import UsageError
from primus.machine import measurements
from primus.machine import profile as profiles
from primus.machine.facts import MachineFacts
from primus.machine.measurements import MeasuredFigure, MeasurementPlan, MeasurementResults, RankResult
from primus.machine.profile import Profile
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.rules import About, judge, report_info
from primus.preflight.performance import fault_localization
from primus.preflight.performance.baselines import (
    GIB,
    MIB,
    Demands,
    PerformanceBaseline,
    format_device_name,
    format_floor,
)
from primus.preflight.performance.communication import CommunicationJudge
from primus.preflight.performance.soak import SoakJudge
from primus.report import benchmark_history, table
from primus.runs.files import read_json

CONFIG_FILE = "config/preflight.json"
"""File of a run that contains the plan for its workers."""

__all__ = [
    "CONFIG_FILE",
    "Demands",
    "MeasurementPlan",
    "MeasurementResults",
    "complete_demands",
    "judge_results",
    "plan_measurements",
    "read_results",
]

GPU_SIZES = tuple(2**power for power in range(3, 35))
"""8 B to 16 GiB, the usual range of nccl-tests."""
CPU_SIZES = tuple(2**power for power in range(3, 27, 3))
BUFFERS_SHARE = 6
"""A message takes at most 1/6 of a device's memory, which also holds the receive buffer and the check."""
KERNELS = ("copy", "mul", "add", "triad", "dot")
JUDGED_BY_SOAK = (*measurements.SOAK_TESTS, "host_triad")
NO_FLOOR = "no floor is known for this device"
CPU_FLOOR = "CPUs have no floor: results depend on other processes"


def complete_demands(environ: Mapping[str, str], given: Demands) -> Demands:
    """`given`, completed with the variables PRIMUS_PREFLIGHT_MIN_TFLOPS and _MIN_FREE_MEM_GB of Primus
    (AMD-AGI/Primus).

    Raises:
        UsageError: A variable is not a positive number.
    """
    tflops = _parse_number(environ, "PRIMUS_PREFLIGHT_MIN_TFLOPS")
    free_gb = _parse_number(environ, "PRIMUS_PREFLIGHT_MIN_FREE_MEM_GB")
    return structs.replace(
        given,
        gemm_tflops_min=tflops if given.gemm_tflops_min is None else given.gemm_tflops_min,
        free_memory_gb_min=given.free_memory_gb_min if free_gb is None else free_gb,
        best_figures=benchmark_history.read_best_figures(environ),
    )


def plan_measurements(
    facts: MachineFacts, demands: Demands, *, is_quick: bool, timeout_s: float = 120.0
) -> MeasurementPlan:
    """The measurements for machines like the one of `facts`."""
    demanded_bytes = demands.rccl_size_mb * MIB
    if not facts.devices:
        return MeasurementPlan(
            sizes_bytes=(64 * 1024, 4 * MIB) if is_quick else CPU_SIZES,
            pair_bytes=MIB if is_quick else 16 * MIB,
            gemm_size=512 if is_quick else 2048,
            dtype="fp32",
            is_quick=is_quick,
            timeout_s=timeout_s,
        )
    known = _find_profile(facts)
    sizes = {demanded_bytes, GIB} if is_quick else {demanded_bytes, *GPU_SIZES}
    memory_bytes = min((part.memory_bytes for part in facts.partitions if part.memory_bytes), default=64 * GIB)
    return MeasurementPlan(
        sizes_bytes=tuple(sorted(size for size in sizes if size <= memory_bytes // BUFFERS_SHARE)),
        pair_bytes=64 * MIB if is_quick else 256 * MIB,
        gemm_size=8192,
        is_quick=is_quick,
        timeout_s=timeout_s,
        last_level_cache_bytes=known.last_level_cache_bytes if known else None,
    )


def read_results(folder: Path, asked: MeasurementPlan, world_size: int) -> MeasurementResults:
    """The results of the workers of the run in `folder`; incomplete if workers ended early.

    Raises:
        PrimusError: A result file is damaged.
    """
    # Rank 0 writes the merged file at the end. Without it the tests ended early, and the files of single ranks count.
    if (folder / measurements.FILE).is_file():
        return read_json(folder / measurements.FILE, MeasurementResults)
    files = [folder / measurements.find_measurements_file(rank) for rank in range(world_size)]
    results = measurements.merge_measurements(
        asked, world_size, [read_json(file, measurements.RankMeasurements) for file in files if file.is_file()]
    )
    return structs.replace(results, problem=results.problem or "the tests ended before the results were gathered")


def judge_results(results: MeasurementResults, facts: MachineFacts, demands: Demands) -> list[CheckFinding]:
    """Judge the results; `host` of a finding names its node, or is empty for all nodes."""
    return list(PerformanceJudge(PerformanceBaseline(results, facts, _find_profile(facts), demands)).judge_all())


def _find_profile(facts: MachineFacts) -> Profile | None:
    return profiles.find_profile_by_name(facts.model) if facts.model else None


def _parse_number(environ: Mapping[str, str], name: str) -> float | None:
    if not environ.get(name):
        return None
    try:
        value = float(environ[name])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"${name}: {environ[name]!r} is not a positive number")
    return value


class PerformanceJudge:
    """Findings for the results of one run."""

    def __init__(self, baseline: PerformanceBaseline) -> None:
        self._baseline = baseline
        self._results = baseline.results
        self._ranks = baseline.ranks
        self._on_gpu = baseline.on_gpu

    def judge_all(self) -> Iterator[CheckFinding]:
        """All findings, those of single devices first."""
        yield self._judge_completeness()
        if self._results.ranks:
            for test in self._list_expected_tests():
                yield from self._judge_device_test(test)
        if "collectives" in self._results.asked.tests:
            yield from CommunicationJudge(self._baseline).judge_collectives()
        if "pairs" in self._results.asked.tests:
            yield from CommunicationJudge(self._baseline).judge_pairs()
        yield from self._judge_soak()

    def _judge_soak(self) -> Iterator[CheckFinding]:
        soak = SoakJudge(self._baseline)
        tests = {
            "host_memory": soak.judge_host_memory, "quickstart": soak.judge_quickstart, "burn_in": soak.judge_burn_in
        }  # fmt: skip
        for name in (name for name in measurements.SOAK_TESTS if name in self._results.asked.tests):
            yield from tests[name]()

    def _judge_completeness(self) -> CheckFinding:
        results = self._results
        is_complete = not results.problem and len(results.ranks) == results.world_size > 0
        shown = results.problem or f"results of {len(results.ranks)} of {results.world_size} ranks"
        return judge("performance.complete", is_complete, shown, world_size=results.world_size)

    def _list_expected_tests(self) -> list[str]:
        names = {
            "sanity": ["sanity"],
            "gemm": [f"gemm_{self._results.asked.dtype}"],
            "memory": [f"memory_{kernel}" for kernel in KERNELS],
            "kernels": ["kernels"],
            "copies": ["host_to_device", "device_to_host"] if self._on_gpu else [],
        }
        expected = [name for test in self._results.asked.tests for name in names.get(test, [])]
        found = [figure.test for rank in self._results.ranks for figure in rank.figures]
        others = (test for test in found if test not in names and test not in JUDGED_BY_SOAK)
        return list(dict.fromkeys([*expected, *others]))

    def _judge_device_test(self, test: str) -> Iterator[CheckFinding]:
        """One finding for each outlier, and one for all other devices of each node."""
        figures = {rank.rank: _find_figure(rank, test) for rank in self._results.ranks}
        values = {
            rank: figure.value
            for rank, figure in figures.items()
            if figure and figure.value is not None and not figure.wrong
        }
        outliers = (
            fault_localization.find_outliers(values, self._baseline.demands.outlier_percent / 100)
            if self._is_compared(test)
            else {}
        )
        usual: dict[int, list[int]] = defaultdict(list)
        for rank, figure in figures.items():
            finding = self._find_fault(self._ranks[rank], test, figure) or self._report_outlier(
                rank, test, values, outliers
            )
            if finding:
                yield finding
            else:
                usual[self._ranks[rank].node].append(rank)
        for ranks in usual.values():
            yield self._report_usual_figures(test, ranks, [values[rank] for rank in ranks])

    def _is_compared(self, test: str) -> bool:
        """Whether devices of the same model must reach similar figures in this test."""
        return self._on_gpu and test not in ("sanity", "kernels")

    def _find_fault(self, rank: RankResult, test: str, figure: MeasuredFigure | None) -> CheckFinding | None:
        """The fault of a single device, without comparison with others."""
        about, check = About(format_device_name(rank), self._baseline.find_host(rank.rank)), f"performance.{test}"
        if figure is None:
            return judge("device_test/not_measured", False, "", about, check=check)
        words, shown = {"check": check, "value": figure.value}, _format_figure(figure)
        if figure.wrong or figure.value is None:
            return judge("device_test/wrong", False, figure.problem or "no figure", about, **words)
        floor, peak = self._baseline.find_floor(test), self._baseline.find_peak(test)
        if peak is not None and figure.value > peak:
            wanted = f"{table.format_number(peak)} {figure.unit}"
            return judge("device_test/above_peak", False, shown, about, wanted=wanted, **words)
        if floor is not None and figure.value < floor.value:
            words |= {"wanted": format_floor(floor), "floor_source": floor.source}
            return judge("device_test", False, shown, about, status="warn" if test == "sanity" else "fail", **words)
        return None

    def _report_outlier(
        self, rank: int, test: str, values: Mapping[int, float], outliers: Mapping[int, fault_localization.PairOutlier]
    ) -> CheckFinding | None:
        if rank not in outliers:
            return None
        outlier, unit = outliers[rank], self._baseline.find_unit(test)
        about = About(format_device_name(self._ranks[rank]), self._baseline.find_host(rank))
        shown = (
            f"{table.format_number(values[rank])} {unit}, {outlier.below:.0%} below the median of {len(values)} devices"
        )
        words = {
            "check": f"performance.{test}",
            "tolerance": self._baseline.demands.outlier_percent,
            "wanted": f"{table.format_number(statistics.median(values.values()))} {unit}",
            "status": "fail" if outlier.z > fault_localization.ROBUST_Z else "warn",
            "value": values[rank],
        }
        return judge("device_test/outlier", False, shown, about, **words)

    def _report_usual_figures(self, test: str, ranks: Sequence[int], values: Sequence[float]) -> CheckFinding:
        """Figures of the healthy devices of one node."""
        first, floor, peak = self._ranks[ranks[0]], self._baseline.find_floor(test), self._baseline.find_peak(test)
        low, high, median = min(values), max(values), statistics.median(values)
        spread = (
            ""
            if len(values) == 1
            else f" ({table.format_number(low)} - {table.format_number(high)}, {len(values)} devices)"
        )
        shown = f"{table.format_number(median)} {self._baseline.find_unit(test)}{spread}" + (
            f", {median / peak:.0%} of peak" if peak else ""
        )
        best = self._baseline.find_best(test)
        shown += f", {median / best:.0%} of the best measured" if best else ""
        about, check = About(host=self._baseline.find_host(first.rank)), f"performance.{test}"
        if floor is None and test in ("sanity", "kernels"):
            return judge(check, True, shown, about, value=median)
        if floor is None:
            return report_info(check, shown, NO_FLOOR if self._on_gpu else CPU_FLOOR, about, value=median)
        words = {"wanted": format_floor(floor), "floor_source": floor.source}
        return judge("device_test", True, shown, about, check=check, value=median, **words)


def _find_figure(rank: RankResult, test: str) -> MeasuredFigure | None:
    """A rank's figure of a test; a problem of a group of tests applies to each of them."""
    by_name = {figure.test: figure for figure in rank.figures}
    group = {"host_to_device": "copies", "device_to_host": "copies"}.get(test, test.partition("_")[0])
    return by_name.get(test) or by_name.get(group)


def _format_figure(figure: MeasuredFigure) -> str:
    return f"{table.format_number(figure.value)} {figure.unit}"

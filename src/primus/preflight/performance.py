"""What the measured performance of nodes says of their fitness."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from primus.errors import UsageError
from primus.machine import measured
from primus.machine import profile as profiles
from primus.machine.facts import Facts
from primus.machine.measured import Asked, Collective, Figure, Pair, RankResult, Results
from primus.machine.profile import Floor, Profile
from primus.preflight import pairs
from primus.preflight.finding import Finding
from primus.preflight.node import info, judged, listed, unknown
from primus.report import table
from primus.runs.files import read_json

CONFIG_FILE = "config/preflight.json"
"""Where the workers of a run find what they are asked to measure."""

__all__ = ["CONFIG_FILE", "Asked", "Demands", "Results", "demanded", "findings", "plan", "read"]

GIB = 2**30
MIB = 2**20
GPU_SIZES = tuple(2**power for power in range(3, 34))
"""8 B to 8 GiB, as nccl-tests users sweep."""
CPU_SIZES = tuple(2**power for power in range(3, 27, 3))
KERNELS = ("copy", "mul", "add", "triad", "dot")
FLOOR_RANKS = 8
"""Devices whose collectives the profiles' floors are of."""
FLOOR_SIZES = {64 * MIB: "all_reduce_64m", 8 * GIB: "all_reduce"}
SLOW_ON_CPU = 0.9
"""Relative distance below what is usual that a pair of CPU processes is named for: they share cores with all else."""
NO_FLOOR = "no floor is known for this device"
ALONE = "nobody to communicate with: start several processes"
CPU_FLOOR = "a CPU's figures have no floor: they depend on who else uses its cores"


class Demands(Struct, frozen=True, kw_only=True):
    """What the user demands of every device; None leaves it to the device's profile."""

    gemm_tflops_min: float | None = None
    hbm_gbs_min: float | None = None
    """Of the memory's copy rate."""
    rccl_gbs_min: float | None = None
    """Of the bus bandwidth of a node's all_reduce of `rccl_size_mb`."""
    rccl_size_mb: int = 64
    """MiB."""
    free_memory_gb_min: float = 1.0
    """Of each device, 1e9 B (AMD-AGI/Primus, PRIMUS_PREFLIGHT_MIN_FREE_MEM_GB)."""
    floors: Mapping[str, float] = {}
    """By test, over those of the device's profile: ``gemm_bf16`` in TFLOP/s, ``memory_copy`` in GB/s."""
    outlier_percent: float = 100 * pairs.BELOW_MEDIAN
    """A device this far below the median of all is named."""


def demanded(environ: Mapping[str, str], given: Demands) -> Demands:
    """`given`, completed from the existing system's PRIMUS_PREFLIGHT_MIN_TFLOPS and _MIN_FREE_MEM_GB.

    Raises:
        UsageError: A variable is not a positive number.
    """
    tflops = _number(environ, "PRIMUS_PREFLIGHT_MIN_TFLOPS")
    free_gb = _number(environ, "PRIMUS_PREFLIGHT_MIN_FREE_MEM_GB")
    return structs.replace(
        given,
        gemm_tflops_min=tflops if given.gemm_tflops_min is None else given.gemm_tflops_min,
        free_memory_gb_min=given.free_memory_gb_min if free_gb is None else free_gb,
    )


def plan(facts: Facts, demands: Demands, *, is_quick: bool, timeout_s: float = 120.0) -> Asked:
    """What to measure on machines like the one of `facts`."""
    demanded_bytes = demands.rccl_size_mb * MIB
    if not facts.devices:
        return Asked(
            sizes_bytes=(64 * 1024, 4 * MIB) if is_quick else CPU_SIZES,
            pair_bytes=MIB if is_quick else 16 * MIB,
            gemm_size=512 if is_quick else 2048,
            dtype="fp32",
            is_quick=is_quick,
            timeout_s=timeout_s,
        )
    known = _profile(facts)
    sizes = (demanded_bytes, GIB) if is_quick else (*GPU_SIZES, demanded_bytes)
    return Asked(
        sizes_bytes=tuple(sorted(set(sizes))),
        pair_bytes=64 * MIB if is_quick else 256 * MIB,
        gemm_size=8192,
        is_quick=is_quick,
        timeout_s=timeout_s,
        last_level_cache_bytes=known.last_level_cache_bytes if known else None,
    )


def read(folder: Path, asked: Asked, world_size: int) -> Results:
    """What the workers of the run in `folder` measured, as far as they came.

    Raises:
        PrimusError: A file of theirs is damaged.
    """
    if (folder / measured.FILE).is_file():
        return read_json(folder / measured.FILE, Results)
    files = [folder / measured.part_file(rank) for rank in range(world_size)]
    results = measured.gathered(asked, world_size, [read_json(file, measured.Part) for file in files if file.is_file()])
    return structs.replace(results, problem=results.problem or "the tests ended before the results were gathered")


def findings(results: Results, facts: Facts, demands: Demands) -> list[Finding]:
    """Judge what was measured; `host` of a finding names the node that it is about, empty for all."""
    return list(Judge(results, facts, _profile(facts), demands).findings())


def _profile(facts: Facts) -> Profile | None:
    return profiles.by_name(facts.model) if facts.model else None


def _number(environ: Mapping[str, str], name: str) -> float | None:
    if not environ.get(name):
        return None
    try:
        value = float(environ[name])
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"${name}: {environ[name]!r} is not a positive number")
    return value


class Judge:
    """The results of one run beside what its devices should reach.

    Args:
        results: What was measured.
        facts: A node like all of them.
        profile: Of its devices; None where they are not known, or where there are none.
        demands: Of the user.
    """

    def __init__(self, results: Results, facts: Facts, profile: Profile | None, demands: Demands) -> None:
        self._results = results
        self._profile = profile
        self._demands = demands
        self._on_gpu = any(rank.device.startswith("cuda") for rank in results.ranks) or bool(facts.devices)
        self._of_card = len(facts.devices) / len(facts.partitions) if facts.partitions else 1.0
        """Part of a card that a process has."""
        self._ranks = {rank.rank: rank for rank in results.ranks}

    def findings(self) -> Iterator[Finding]:
        """Everything, devices first."""
        yield self._complete()
        if self._results.ranks:
            for test in self._expected_tests():
                yield from self._device_test(test)
        if "collectives" in self._results.asked.tests:
            yield from self._collectives()
        if "pairs" in self._results.asked.tests:
            yield from self._pairs()

    def _complete(self) -> Finding:
        results = self._results
        return judged(
            not results.problem and len(results.ranks) == results.world_size > 0,
            "fail",
            "performance.complete",
            results.problem or f"results of {len(results.ranks)} of {results.world_size} ranks",
            f"all tests of {results.world_size} ranks",
            "what was not measured is not known to be healthy",
            "see logs/ of the run: the rank that failed first, or that never spoke",
        )

    def _expected_tests(self) -> list[str]:
        names = {
            "sanity": ["sanity"],
            "gemm": [f"gemm_{self._results.asked.dtype}"],
            "memory": [f"memory_{kernel}" for kernel in KERNELS],
            "copies": ["host_to_device", "device_to_host"] if self._on_gpu else [],
        }
        expected = [name for test in self._results.asked.tests for name in names.get(test, [])]
        found = [figure.test for rank in self._results.ranks for figure in rank.figures]
        return list(dict.fromkeys([*expected, *(test for test in found if test not in names)]))

    def _device_test(self, test: str) -> Iterator[Finding]:
        """One finding for each device that stands out, and one for all others of each node."""
        figures = {rank.rank: _figure(rank, test) for rank in self._results.ranks}
        values = {
            rank: figure.value
            for rank, figure in figures.items()
            if figure and figure.value is not None and not figure.wrong
        }
        outliers = pairs.outliers(values, self._demands.outlier_percent / 100) if self._compares(test) else {}
        usual: dict[int, list[int]] = defaultdict(list)
        for rank, figure in figures.items():
            finding = self._fault(self._ranks[rank], test, figure) or self._outlier(rank, test, values, outliers)
            if finding:
                yield finding
            else:
                usual[self._ranks[rank].node].append(rank)
        for ranks in usual.values():
            yield self._usual(test, ranks, [values[rank] for rank in ranks])

    def _compares(self, test: str) -> bool:
        """Whether devices of the same model must reach about the same."""
        return self._on_gpu and test != "sanity"

    def _fault(self, rank: RankResult, test: str, figure: Figure | None) -> Finding | None:
        """What is wrong with one device in itself."""
        about = {"subject": _device(rank), "host": _host(rank)}
        check, floor, peak = f"performance.{test}", self._floor(test), self._peak(test)
        if figure is None:
            return unknown(
                check, "not measured", "a figure", "a device that was not tested is not known to be healthy",
                "see why the tests ended early", **about,
            )  # fmt: skip
        if figure.wrong or figure.value is None:
            return judged(
                False, "fail", check, figure.problem or "no figure", "the right result",
                "a device that computes or copies wrongly spoils a training silently",
                "take the node out; run the vendor's diagnosis of the device", value=figure.value, **about,
            )  # fmt: skip
        if peak is not None and figure.value > peak:
            return unknown(
                check, _shown(figure), f"at most {table.number(peak)} {figure.unit}, the peak",
                "measured above the peak: the clock or the convention is wrong",
                "report it with report/performance.json of the run", value=figure.value, **about,
            )  # fmt: skip
        if floor is not None and figure.value < floor.value:
            return judged(
                False, "fail", check, _shown(figure), _least(floor), floor.source,
                "look at its clocks, temperature and power cap, and at who else uses it", value=figure.value, **about,
            )  # fmt: skip
        return None

    def _outlier(
        self, rank: int, test: str, values: Mapping[int, float], outliers: Mapping[int, pairs.Outlier]
    ) -> Finding | None:
        if rank not in outliers:
            return None
        outlier, median, shown_unit = outliers[rank], statistics.median(values.values()), self._unit(test)
        return judged(
            False,
            "fail" if outlier.z > pairs.ROBUST_Z else "warn",
            f"performance.{test}",
            f"{table.number(values[rank])} {shown_unit}, {outlier.below:.0%} below the median of {len(values)} devices",
            f"within {self._demands.outlier_percent:g} % of {table.number(median)} {shown_unit}",
            "a job runs at the pace of its slowest device",
            "look at its clocks, temperature and power cap; leave the node out if it stays so",
            subject=_device(self._ranks[rank]),
            host=_host(self._ranks[rank]),
            value=values[rank],
        )

    def _usual(self, test: str, ranks: Sequence[int], values: Sequence[float]) -> Finding:
        """What the healthy devices of one node reached."""
        first, floor, peak = self._ranks[ranks[0]], self._floor(test), self._peak(test)
        low, high, median = min(values), max(values), statistics.median(values)
        spread = "" if len(values) == 1 else f" ({table.number(low)} - {table.number(high)}, {len(values)} devices)"
        shown = f"{table.number(median)} {self._unit(test)}{spread}" + (
            f", {median / peak:.0%} of peak" if peak else ""
        )
        best = self._best(test)
        shown += f", {median / best:.0%} of the best measured" if best else ""
        about = {"host": _host(first), "value": median}
        if floor is None and test == "sanity":
            return judged(
                True, "fail", "performance.sanity", shown, "a right product", "compared with fp64", "", **about
            )
        if floor is None:
            return info(f"performance.{test}", shown, NO_FLOOR if self._on_gpu else CPU_FLOOR, **about)
        return judged(True, "fail", f"performance.{test}", shown, _least(floor), floor.source, "", **about)

    def _unit(self, test: str) -> str:
        figures = (figure for rank in self._results.ranks for figure in rank.figures)
        return next((figure.unit for figure in figures if figure.test == test and figure.unit), "GB/s")

    def _floor(self, test: str) -> Floor | None:
        """What a device must reach in a test, of the user or known."""
        demands = self._demands
        wanted = {
            f"gemm_{self._results.asked.dtype}": demands.gemm_tflops_min,
            "memory_copy": demands.hbm_gbs_min,
            "sanity": demands.free_memory_gb_min if self._on_gpu else None,
        }.get(test)
        if wanted is not None:
            return Floor(value=wanted, unit=self._unit(test), source="as demanded")
        return self._known_floor(test)

    def _known_floor(self, test: str) -> Floor | None:
        """The thresholds file's, else the profile's."""
        floor = self._profile.floors.get(test) if self._profile else None
        if test in self._demands.floors:
            floor = Floor(value=self._demands.floors[test], unit=self._unit(test), source="thresholds file")
        return structs.replace(floor, value=floor.value * self._of_card) if floor else None

    def _peak(self, test: str) -> float | None:
        if self._profile is None:
            return None
        peaks: Mapping[Any, float] = self._profile.peaks
        peak = self._profile.memory_gb_per_s if test.startswith("memory_") else peaks.get(test.removeprefix("gemm_"))
        return peak * self._of_card if peak else None

    def _best(self, test: str) -> float | None:
        achieved: Mapping[Any, float] = self._profile.achieved if self._profile else {}
        best = achieved.get(test.removeprefix("gemm_")) if test.startswith("gemm_") else None
        return best * self._of_card if best else None

    def _collectives(self) -> Iterator[Finding]:
        by_group: dict[tuple[str, tuple[int, ...], str], list[Collective]] = defaultdict(list)
        for found in self._results.collectives:
            by_group[found.scope, found.ranks, found.operation].append(found)
        for (_, ranks, _), sweep in by_group.items():
            if len(ranks) > 1:
                yield from self._sweep(sorted(sweep, key=lambda found: found.size_bytes))
        groups = {(scope, ranks) for scope, ranks, _ in by_group}
        for _, ranks in sorted(groups):
            if len(ranks) == 1:
                host = _host(self._ranks[ranks[0]]) if ranks[0] in self._ranks else ""
                yield info("performance.collectives", "single rank", ALONE, host=host)
        missing = self._num_groups() - len(groups)
        if missing > 0:
            yield unknown(
                "performance.collectives", f"not measured in {missing} of {self._num_groups()} groups of ranks",
                "every group", "what was not measured is not known to be healthy", "see why the tests ended early",
            )  # fmt: skip

    def _num_groups(self) -> int:
        nodes = len({rank.node for rank in self._results.ranks}) or 1
        return nodes + (nodes > 1)

    def _sweep(self, sweep: Sequence[Collective]) -> Iterator[Finding]:
        """One operation over all sizes in one group."""
        check, about = self._named(sweep[0])
        timed = [found for found in sweep if found.busbw_gb_per_s is not None]
        for problem in dict.fromkeys(found.problem for found in sweep if found.busbw_gb_per_s is None):
            yield unknown(check, problem or "no time", "a figure", "it was asked for", "see the run's logs", **about)
        yield from self._wrong(check, sweep, about)
        if not timed:
            return
        yield self._bandwidth(check, timed, about)
        if self._on_gpu:
            yield from self._dips(check, timed, about)

    def _named(self, found: Collective) -> tuple[str, dict[str, Any]]:
        """The check's name, and the node that it is about."""
        if found.scope == "all":
            return f"performance.{found.operation}_between_nodes", {}
        leader = self._ranks.get(found.ranks[0])
        return f"performance.{found.operation}", {"host": _host(leader)} if leader else {}

    def _wrong(self, check: str, sweep: Sequence[Collective], about: Mapping[str, Any]) -> Iterator[Finding]:
        wrong = [entry for found in sweep for entry in found.wrong]
        if not wrong:
            return
        ranks = sweep[0].ranks
        met = [pairs.Result(a, b, 1.0) for i, a in enumerate(ranks) for b in ranks[i + 1 :]]
        bad = {
            pairs.Result(min(entry.rank, entry.source), max(entry.rank, entry.source), 1.0)
            for entry in wrong
            if entry.source is not None and entry.source != entry.rank
        }
        yield judged(
            False, "fail", check, f"{sum(entry.count for entry in wrong)} wrong elements{self._suspects(met, bad)}",
            "none", "small integers, whose sums are exact, by nccl-tests' way of checking",
            "take the named node out; without a name, look at the pairs", **about,
        )  # fmt: skip

    def _suspects(self, met: Iterable[pairs.Result], bad: Iterable[pairs.Result]) -> str:
        blamed = pairs.blame(met, bad)
        return f"; to blame: {listed(self._rank_name(rank) for rank in blamed)}" if blamed else ""

    def _bandwidth(self, check: str, timed: Sequence[Collective], about: Mapping[str, Any]) -> Finding:
        """The bus bandwidth of the largest size and the time of the smallest, beside the floor where there is one."""
        shown = f"busbw {_busbw(timed[-1])}, {_latency(timed[0])}, {len(timed[0].ranks)} ranks"
        floored = [(found, floor) for found in timed for floor in [self._collective_floor(found)] if floor]
        for found, floor in floored:
            if (found.busbw_gb_per_s or 0.0) < floor.value:
                least = f"{_least(floor)} at {table.size(found.size_bytes)}"
                return judged(
                    False, "fail", check, f"busbw {_busbw(found)}", least, floor.source,
                    "look at the links between the devices, and at the library's settings in `env show`",
                    value=found.busbw_gb_per_s, **about,
                )  # fmt: skip
        if not floored:
            why = f"floors are of {FLOOR_RANKS} devices of a node" if self._on_gpu else "gloo over the host's network"
            return info(check, shown, why, value=timed[-1].busbw_gb_per_s, **about)
        least = ", ".join(f"{_least(floor)} at {table.size(found.size_bytes)}" for found, floor in floored)
        return judged(
            True, "fail", check, shown, least, floored[-1][1].source, "", value=timed[-1].busbw_gb_per_s, **about
        )

    def _collective_floor(self, found: Collective) -> Floor | None:
        if found.operation != "all_reduce" or found.scope != "node":
            return None
        demands = self._demands
        if demands.rccl_gbs_min is not None and _is_near(found.size_bytes, demands.rccl_size_mb * MIB):
            return Floor(value=demands.rccl_gbs_min, unit="GB/s", source="as demanded")
        test = next((test for size, test in FLOOR_SIZES.items() if _is_near(found.size_bytes, size)), None)
        is_comparable = len(found.ranks) == FLOOR_RANKS and self._of_card == 1
        return self._known_floor(test) if test and is_comparable else None

    def _dips(self, check: str, timed: Sequence[Collective], about: Mapping[str, Any]) -> Iterator[Finding]:
        by_size = {found.size_bytes: found.busbw_gb_per_s or 0.0 for found in timed}
        for small, large in pairs.dips(by_size):
            drop = 1 - by_size[large] / by_size[small]
            yield judged(
                False, "warn", f"{check}_dip",
                f"{drop:.0%} lower at {table.size(large)} than at {table.size(small)}", "no drop above 5 %",
                "bandwidth grows with the size until it stays (ROCm/cvs)",
                "measure again; then look at the algorithm and protocol that the library chooses there", **about,
            )  # fmt: skip

    def _pairs(self) -> Iterator[Finding]:
        for between_nodes in (False, True):
            found = [pair for pair in self._results.pairs if pair.between_nodes == between_nodes]
            expected = self._num_pairs(between_nodes)
            if len(found) < expected:
                yield unknown(
                    _pair_check(between_nodes), f"{expected - len(found)} of {expected} pairs were not measured",
                    "every pair", "what was not measured is not known to be healthy", "see why the tests ended early",
                )  # fmt: skip
            if found:
                yield from self._scan(found, between_nodes)
        if self._results.world_size == 1:
            yield info("performance.pairs", "single rank", ALONE)

    def _num_pairs(self, between_nodes: bool) -> int:
        sizes = Counter(rank.node for rank in self._results.ranks)
        if between_nodes:
            return math.comb(len(sizes), 2)
        return sum(math.comb(size, 2) for size in sizes.values())

    def _scan(self, scan: Sequence[Pair], between_nodes: bool) -> Iterator[Finding]:
        """Who is slow or wrong with several partners; which link is, where nobody is to blame."""
        check = _pair_check(between_nodes)
        results = {pairs.Result(pair.first, pair.second, None if pair.wrong else pair.gb_per_s): pair for pair in scan}
        below = self._demands.outlier_percent / 100 if self._on_gpu else SLOW_ON_CPU
        bad = pairs.bad_pairs(results, below=below)
        blamed = pairs.blame(results, bad)
        if not self._on_gpu:  # one slow pair says nothing where they share cores
            bad = [result for result in bad if result.value is None or {result.first, result.second} & {*blamed}]
        rates = [pair.gb_per_s for pair in scan if pair.gb_per_s]
        shown = (
            f"{table.number(min(rates, default=None))} - {table.number(max(rates, default=None))} GB/s per direction"
        )
        if not bad:
            yield judged(
                True, "fail", check, f"{len(scan)} pairs, {shown}", "each right, and about as fast as the others",
                "circle method: each two once, as many at once as there can be", "", value=min(rates),
            )  # fmt: skip
            return
        for name in blamed:
            yield self._slow(check, name, [pair for pair in bad if name in pair[:2]], shown)
        for result in bad:
            if result.first not in blamed and result.second not in blamed:
                yield self._bad_link(check, results[result], shown)

    def _slow(self, check: str, name: Hashable, bad: Sequence[pairs.Result], shown: str) -> Finding:
        assert isinstance(name, int)
        is_wrong = any(pair.value is None for pair in bad)
        slowest = min((pair.value for pair in bad if pair.value is not None), default=None)
        what = "wrong or no data" if is_wrong else f"down to {table.number(slowest)} GB/s"
        rank = self._ranks.get(name)
        return judged(
            False, "fail" if is_wrong or self._on_gpu else "warn", check,
            f"{what} with {len(bad)} partners, where all pairs have {shown}", "as its partners with others",
            "slow with several partners who are well with others", "leave the node out, and look at its network",
            subject=self._rank_name(name), host=_host(rank) if rank else "", value=slowest,
        )  # fmt: skip

    def _bad_link(self, check: str, pair: Pair, shown: str) -> Finding:
        what = f"{pair.wrong} wrong elements" if pair.wrong else f"{table.number(pair.gb_per_s)} GB/s"
        return judged(
            False, "fail" if pair.wrong else "warn", check, f"{what}, where all pairs have {shown}",
            "as the other pairs", "both are well with others: it is the way between them",
            "look at the cables and switches between them",
            subject=f"{self._rank_name(pair.first)} with {self._rank_name(pair.second)}", value=pair.gb_per_s,
        )  # fmt: skip

    def _rank_name(self, rank: Hashable) -> str:
        result = self._ranks.get(rank) if isinstance(rank, int) else None
        return f"rank {rank} on {_host(result)}" if result else f"rank {rank}"


def _figure(rank: RankResult, test: str) -> Figure | None:
    """A rank's figure of a test; one that ended a whole group of tests stands for each of them."""
    by_name = {figure.test: figure for figure in rank.figures}
    group = {"host_to_device": "copies", "device_to_host": "copies"}.get(test, test.partition("_")[0])
    return by_name.get(test) or by_name.get(group)


def _device(rank: RankResult) -> str:
    kind, _, number = rank.device.partition(":")
    return f"rank {rank.rank} (GPU {number})" if kind == "cuda" else f"rank {rank.rank}"


def _host(rank: RankResult) -> str:
    """Short name of its node, as reports have it."""
    return rank.host.partition(".")[0]


def _shown(figure: Figure) -> str:
    return f"{table.number(figure.value)} {figure.unit}"


def _least(floor: Floor) -> str:
    return f"at least {table.number(floor.value)} {floor.unit}"


def _busbw(found: Collective) -> str:
    return f"{table.number(found.busbw_gb_per_s)} GB/s at {table.size(found.size_bytes)}"


def _latency(found: Collective) -> str:
    return f"{table.number((found.time_s or 0.0) * 1e6)} us at {table.size(found.size_bytes)}"


def _is_near(size_bytes: int, wanted_bytes: int) -> bool:
    """Whether a size is the wanted one, rounded to whole elements for each rank."""
    return abs(size_bytes - wanted_bytes) <= wanted_bytes // 1000


def _pair_check(between_nodes: bool) -> str:
    return "performance.pairs_between_nodes" if between_nodes else "performance.pairs"

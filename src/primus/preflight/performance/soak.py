"""Judge the results of a soak: burn-in, telemetry, reference trainings, and host memory."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from primus.machine.measurements import BurnIn, LoadWindow, RankResult, Telemetry
from primus.machine.tools.vitals import NORMAL_LIMITS
from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.findings.node import format_names, judge_value, report_info, report_unknown
from primus.preflight.performance import fault_localization
from primus.preflight.performance.baselines import PerformanceBaseline, format_device_name, format_floor
from primus.report import table

COMPARED_S = 60.0
"""The first minute is compared with the last one; a shorter burn-in is compared by thirds."""
SLOWER = 0.05
"""Relative loss of speed over time that is reported: the variance rule of microsoft/superbenchmark."""
SLOW_HOST = 0.15
"""Relative distance below the median of the nodes: the memory bandwidth of hosts varies more than that of devices."""
SILENT = "silent data corruption: wrong results without an error message"
TAKE_OUT = "remove the node; run the vendor's diagnostics; replace the device"


class SoakJudge:
    """Findings of the long tests."""

    def __init__(self, baseline: PerformanceBaseline) -> None:
        self._baseline = baseline
        self._ranks = sorted(baseline.ranks.values(), key=lambda rank: rank.rank)
        self._on_gpu = baseline.on_gpu

    def judge_burn_in(self) -> Iterator[CheckFinding]:
        """Results, speed over time and telemetry of each device."""
        done = {rank.rank: rank.burn_in for rank in self._ranks if rank.burn_in and rank.burn_in.windows}
        for rank in self._ranks:
            if rank.rank not in done:
                yield self._report_not_measured("performance.burn_in", rank, "burn_in")
        # A digest is compared only with ranks of the same key: other models and libraries round differently without a
        # fault.
        disputed = find_minority({rank: (result.key, result.digest) for rank, result in done.items()})
        unsteady = [rank for rank, result in done.items() if result.wrong_words]
        # If every device gives irreproducible results, the library or the kernel is at fault, not all devices at
        # once.
        is_software = len(done) > 1 and len(unsteady) == len(done)
        slow = (
            fault_localization.find_outliers({rank: _compute_rate(result.windows) for rank, result in done.items()})
            if self._on_gpu
            else {}
        )
        healthy: dict[int, list[int]] = defaultdict(list)
        for number, result in done.items():
            rank = self._baseline.ranks[number]
            bad = [
                *self._report_wrong_results(rank, result, is_software=is_software),
                *self._report_disputed_results("performance.burn_in_compared", rank, disputed),
                *self._report_slow_windows(rank, result, slow),
            ]
            yield from bad
            if all(finding.status == "info" for finding in bad):
                healthy[rank.node].append(number)
        for ranks in healthy.values():
            yield self._report_endurance(ranks, [done[rank] for rank in ranks])
        yield from self._judge_telemetry()

    def _report_not_measured(self, check: str, rank: RankResult, test: str) -> CheckFinding:
        problem = next((figure.problem for figure in rank.figures if figure.test == test), "")
        about = self._describe_rank(rank)
        if problem:
            return judge_value(False, "fail", check, problem, "completion without error", SILENT, TAKE_OUT, **about)
        return report_unknown(
            check, "not measured", "a result", "untested devices may be faulty",
            "find out why the tests ended early", **about,
        )  # fmt: skip

    def _describe_rank(self, rank: RankResult) -> dict[str, Any]:
        return {"subject": format_device_name(rank), "host": self._baseline.find_host(rank.rank)}

    def _report_wrong_results(self, rank: RankResult, result: BurnIn, *, is_software: bool) -> Iterator[CheckFinding]:
        about = self._describe_rank(rank)
        when = f", first within {result.first_wrong_s:.0f} s" if result.first_wrong_s is not None else ""
        if result.wrong_at_first:
            yield judge_value(
                False, "fail", "performance.burn_in",
                f"{result.wrong_at_first} elements of the first products are wrong", "products as in fp64",
                SILENT, TAKE_OUT, value=result.wrong_at_first, **about,
            )  # fmt: skip
        if result.wrong_words and is_software:
            yield report_unknown(
                "performance.burn_in", f"no device repeats its products{when}", "bit-identical each time",
                "if all devices differ, a library has non-deterministic kernels",
                "try another version of the library; test one device with RVS or DCGM", **about,
            )  # fmt: skip
        elif result.wrong_words:
            yield judge_value(
                False, "fail", "performance.burn_in",
                f"{result.wrong_words} elements of {result.products} products differ from the first time{when}",
                "bit-identical each time", SILENT, TAKE_OUT, value=result.wrong_words, **about,
            )  # fmt: skip
        if result.wrong_memory:
            yield judge_value(
                False, "fail", "performance.burn_in_memory", f"{result.wrong_memory} words lost their pattern{when}",
                "memory keeps its content", SILENT, TAKE_OUT, value=result.wrong_memory, **about,
            )  # fmt: skip

    def _report_disputed_results(
        self, check: str, rank: RankResult, disputed: Mapping[int, str]
    ) -> Iterator[CheckFinding]:
        if rank.rank in disputed:
            yield judge_value(
                False, "fail", check, disputed[rank.rank], "bit-identical to the other devices of its model",
                SILENT, TAKE_OUT, **self._describe_rank(rank),
            )  # fmt: skip

    def _report_slow_windows(
        self, rank: RankResult, result: BurnIn, slow: Mapping[int, fault_localization.PairOutlier]
    ) -> Iterator[CheckFinding]:
        first, last = split_windows(result)
        status: Status = "fail" if self._on_gpu else "info"
        if last < first * (1 - SLOWER):
            yield judge_value(
                False, status, "performance.burn_in_slowdown",
                f"{_format_tflops(last)} at the end, {_format_tflops(first)} at the beginning: "
                f"{1 - last / first:.0%} slower",
                f"at most {SLOWER:.0%} slower", "a device with a cooling or power problem slows all others"
                if self._on_gpu else "CPU speed depends on other processes",
                "check temperature and throttling (performance.telemetry), fans and power supply",
                value=last, **self._describe_rank(rank),
            )  # fmt: skip
        if rank.rank in slow:
            outlier = slow[rank.rank]
            yield judge_value(
                False, "fail" if outlier.z > fault_localization.ROBUST_Z else "warn", "performance.burn_in_speed",
                f"{_format_tflops(_compute_rate(result.windows))}, {outlier.below:.0%} below the median of the devices",
                "as the other devices", "the slowest device sets the pace of the job",
                "check clocks, temperature and power cap; exclude the node if it persists",
                value=_compute_rate(result.windows), **self._describe_rank(rank),
            )  # fmt: skip

    def _report_endurance(self, ranks: Sequence[int], results: Sequence[BurnIn]) -> CheckFinding:
        rates = [_compute_rate(result.windows) for result in results]
        seconds = min(result.duration_s for result in results)
        products = sum(result.products for result in results)
        return judge_value(
            True, "fail", "performance.burn_in",
            f"{len(ranks)} devices, {table.format_duration(seconds)}, {products} products of the same bits, "
            f"{_format_tflops(min(rates))} - {_format_tflops(max(rates))}", "bit-identical each time", SILENT, "",
            host=self._baseline.find_host(ranks[0]), value=min(rates),
        )  # fmt: skip

    def _judge_telemetry(self) -> Iterator[CheckFinding]:
        """Throttling, temperature and errors under load of each GPU, and GPUs whose clocks are outliers."""
        gpus = {(rank.node, gpu.gpu): (rank, gpu) for rank in self._ranks for gpu in rank.telemetry}
        clocks = {name: gpu.clock_mean_mhz for name, (_, gpu) in gpus.items() if gpu.clock_mean_mhz}
        low = fault_localization.find_outliers(clocks)
        for name, (rank, gpu) in gpus.items():
            about = {"subject": f"GPU {gpu.gpu}", "host": self._baseline.find_host(rank.rank)}
            held = _list_health_problems(gpu)
            bad = [*held, *([f"clock {low[name].below:.0%} below the median"] if name in low else [])]
            yield judge_value(
                not bad, "fail" if held else "warn", "performance.telemetry",
                format_names([*bad, *_format_telemetry(gpu)]),
                "no thermal or hardware throttling, no new errors, normal clocks", "sampled under load",
                "check its cooling and its power supply; see the kernel log", value=gpu.clock_mean_mhz, **about,
            )  # fmt: skip
        if self._on_gpu and not gpus:
            reason = "neither the kernel nor a management tool reports clocks and power"
            yield report_info("performance.telemetry", "no samples", reason)

    def judge_quickstart(self) -> Iterator[CheckFinding]:
        """The same small training on every device, twice: bit-identical on one device, and between devices of one
        model."""
        check = "performance.quickstart"
        done = {rank.rank: rank.trainings for rank in self._ranks if rank.trainings}
        for rank in self._ranks:
            if rank.rank not in done:
                yield self._report_not_measured(check, rank, "quickstart")
        restless = [rank for rank, trainings in done.items() if len({one.digest for one in trainings}) > 1]
        is_software = len(done) > 1 and len(restless) == len(done)
        first = {rank: (trainings[0].key, trainings[0].digest) for rank, trainings in done.items()}
        disputed = find_minority({rank: value for rank, value in first.items() if rank not in restless})
        equal: dict[int, list[int]] = defaultdict(list)
        for number, trainings in done.items():
            rank, about = self._baseline.ranks[number], self._describe_rank(self._baseline.ranks[number])
            if any(one.last_loss is None for one in trainings):
                yield judge_value(
                    False, "fail", check, "the loss is not finite", "a finite loss", SILENT, TAKE_OUT, **about
                )
            elif number in restless:
                what = "the second run is not bit-identical"
                status: Status = "unknown" if is_software else "fail"
                yield judge_value(False, status, check, what, "the same bits", SILENT, TAKE_OUT, **about)
            elif number in disputed:
                yield from self._report_disputed_results(check, rank, disputed)
            else:
                equal[rank.node].append(number)
        for ranks in equal.values():
            digests = {done[rank][0].digest for rank in ranks}
            yield judge_value(
                True, "fail", check, f"{len(ranks)} devices, losses and weights {format_names(sorted(digests))}",
                "bit-identical on devices of one model", SILENT, "", host=self._baseline.find_host(ranks[0]),
            )  # fmt: skip

    def judge_host_memory(self) -> Iterator[CheckFinding]:
        """The triad of all processes of a node concurrently, compared with its floor and the other nodes."""
        check, rates = "performance.host_memory", self._list_host_rates()
        for rank in self._ranks:
            figure = next((one for one in rank.figures if one.test == "host_triad"), None)
            if figure is None or figure.wrong:
                yield self._report_not_measured(check, rank, "host_triad" if figure else "host_memory")
        floor = self._baseline.demands.host_gb_per_s_min
        slow = fault_localization.find_outliers(rates, SLOW_HOST)
        for host, rate in rates.items():
            about: dict[str, Any] = {"host": host, "value": rate}
            shown = f"{table.format_number(rate)} GB/s"
            advice = (
                "check the memory modules (host.expect_dimms), the NUMA settings of the firmware, and other processes"
            )
            if floor and rate < floor.value:
                yield judge_value(False, "warn", check, shown, format_floor(floor), floor.source, advice, **about)
            elif host in slow:
                shown += f", {slow[host].below:.0%} below the median of {len(rates)} nodes"
                expected = f"within {SLOW_HOST:.0%} of the others"
                reason = "data loading and host copies need this bandwidth"
                yield judge_value(False, "warn", check, shown, expected, reason, advice, **about)
            elif floor:
                yield judge_value(True, "warn", check, shown, format_floor(floor), floor.source, "", **about)
            else:
                yield report_info(check, shown, "no floor: the module speed needs root", **about)

    def _list_host_rates(self) -> dict[str, float]:
        rates: dict[str, float] = defaultdict(float)
        for rank in self._ranks:
            for figure in rank.figures:
                if figure.test == "host_triad" and figure.value and not figure.wrong:
                    rates[self._baseline.find_host(rank.rank)] += figure.value
        return dict(rates)


def find_minority(results: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Ranks whose digest differs from that of the majority with the same key, with the difference; all of them if there
    is not a majority.

    Args:
        results: Key and digest by rank.
    """
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, (key, digest) in results.items():
        groups[key][rank] = digest
    found: dict[int, str] = {}
    for members in groups.values():
        counts = Counter(members.values())
        usual, votes = counts.most_common(1)[0]
        has_majority = 2 * votes > len(members)
        for rank, digest in members.items():
            if len(counts) > 1 and (digest != usual or not has_majority):
                others = f"{votes} of {len(members)} have {usual}" if has_majority else "no majority agrees"
                found[rank] = f"{digest}, where {others}"
    return found


def split_windows(result: BurnIn) -> tuple[float, float]:
    """Median rate of the first and of the last minute, or of the first and last third of a shorter burn-in.

    The first window warms up the device and is skipped if there are others.
    """
    # With up to three windows none can be spared.
    windows = result.windows[1:] if len(result.windows) > 3 else result.windows
    span = min(COMPARED_S, result.duration_s / 3)
    begin, end = windows[0].begin_s, windows[-1].begin_s
    first = [window for window in windows if window.begin_s <= begin + span]
    last = [window for window in windows if window.begin_s >= end - span]
    return _compute_rate(first), _compute_rate(last)


def _compute_rate(windows: Iterable[LoadWindow]) -> float:
    return statistics.median(window.tflops for window in windows)


def _format_tflops(value: float) -> str:
    return f"{table.format_number(value)} TFLOP/s"


def _list_health_problems(gpu: Telemetry) -> list[str]:
    held = {name: count for name, count in gpu.throttled.items() if name.lower() not in NORMAL_LIMITS}
    found = [f"throttled by {name} in {count} of {gpu.num_samples} samples" for name, count in held.items()]
    return found + ([f"{gpu.new_uncorrectable} new uncorrectable errors"] if gpu.new_uncorrectable else [])


def _format_telemetry(gpu: Telemetry) -> Iterator[str]:
    if gpu.clock_mean_mhz is not None and gpu.clock_min_mhz is not None:
        yield f"clock {gpu.clock_mean_mhz:.0f} MHz (least {gpu.clock_min_mhz:.0f})"
    if gpu.power_mean_w is not None and gpu.power_max_w is not None:
        yield f"{gpu.power_mean_w:.0f} W (most {gpu.power_max_w:.0f})"
    if gpu.temperature_max_c is not None:
        yield f"up to {gpu.temperature_max_c:.0f} C"
    yield f"{gpu.num_samples} samples"

"""Judge the results of a soak: burn-in, telemetry, reference trainings, and host memory."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from primus.machine.measurements import BurnIn, LoadWindow, RankResult, Telemetry
from primus.machine.tools.vitals import NORMAL_LIMITS
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import format_names
from primus.preflight.findings.rules import About, judge, report_info
from primus.preflight.performance import fault_localization
from primus.preflight.performance.baselines import PerformanceBaseline, format_device_name, format_floor
from primus.report import table

COMPARED_S = 60.0
"""The first minute is compared with the last one; a shorter burn-in is compared by thirds."""
SLOWER = 0.05
"""Relative loss of speed over time that is reported: the variance rule of microsoft/superbenchmark."""
SLOW_HOST = 0.15
"""Relative distance below the median of the nodes: the memory bandwidth of hosts varies more than that of devices."""


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
        row = "soak/problem" if problem else "soak/not_measured"
        return judge(row, False, problem, self._describe_rank(rank), check=check)

    def _describe_rank(self, rank: RankResult) -> About:
        return About(format_device_name(rank), self._baseline.find_host(rank.rank))

    def _report_wrong_results(self, rank: RankResult, result: BurnIn, *, is_software: bool) -> Iterator[CheckFinding]:
        about = self._describe_rank(rank)
        when = f", first within {result.first_wrong_s:.0f} s" if result.first_wrong_s is not None else ""
        if result.wrong_at_first:
            wrong = result.wrong_at_first
            yield judge("performance.burn_in/first", False, str(wrong), about, value=wrong)
        if result.wrong_words and is_software:
            yield judge("performance.burn_in/software", False, when, about)
        elif result.wrong_words:
            shown = f"{result.wrong_words} elements of {result.products} products differ from the first time{when}"
            yield judge("performance.burn_in", False, shown, about, value=result.wrong_words)
        if result.wrong_memory:
            wrong = result.wrong_memory
            yield judge("performance.burn_in_memory", False, str(wrong), about, when=when, value=wrong)

    def _report_disputed_results(
        self, check: str, rank: RankResult, disputed: Mapping[int, str]
    ) -> Iterator[CheckFinding]:
        if rank.rank in disputed:
            yield judge("soak/disputed", False, disputed[rank.rank], self._describe_rank(rank), check=check)

    def _report_slow_windows(
        self, rank: RankResult, result: BurnIn, slow: Mapping[int, fault_localization.PairOutlier]
    ) -> Iterator[CheckFinding]:
        first, last = split_windows(result)
        about = self._describe_rank(rank)
        if last < first * (1 - SLOWER):
            shown = (
                f"{_format_tflops(last)} at the end, {_format_tflops(first)} at the beginning: "
                f"{1 - last / first:.0%} slower"
            )
            row = "performance.burn_in_slowdown" if self._on_gpu else "performance.burn_in_slowdown/cpu"
            yield judge(row, False, shown, about, tolerance=SLOWER, value=last)
        if rank.rank in slow:
            outlier, rate = slow[rank.rank], _compute_rate(result.windows)
            shown = f"{_format_tflops(rate)}, {outlier.below:.0%} below the median of the devices"
            status = "fail" if outlier.z > fault_localization.ROBUST_Z else "warn"
            yield judge("performance.burn_in_speed", False, shown, about, status=status, value=rate)

    def _report_endurance(self, ranks: Sequence[int], results: Sequence[BurnIn]) -> CheckFinding:
        rates = [_compute_rate(result.windows) for result in results]
        seconds = min(result.duration_s for result in results)
        products = sum(result.products for result in results)
        shown = (
            f"{len(ranks)} devices, {table.format_duration(seconds)}, {products} products of the same bits, "
            f"{_format_tflops(min(rates))} - {_format_tflops(max(rates))}"
        )
        about = About(host=self._baseline.find_host(ranks[0]))
        return judge("performance.burn_in", True, shown, about, value=min(rates))

    def _judge_telemetry(self) -> Iterator[CheckFinding]:
        """Throttling, temperature and errors under load of each GPU, and GPUs whose clocks are outliers."""
        gpus = {(rank.node, gpu.gpu): (rank, gpu) for rank in self._ranks for gpu in rank.telemetry}
        clocks = {name: gpu.clock_mean_mhz for name, (_, gpu) in gpus.items() if gpu.clock_mean_mhz}
        low = fault_localization.find_outliers(clocks)
        for name, (rank, gpu) in gpus.items():
            about = About(f"GPU {gpu.gpu}", self._baseline.find_host(rank.rank))
            held = _list_health_problems(gpu)
            bad = [*held, *([f"clock {low[name].below:.0%} below the median"] if name in low else [])]
            shown, status = format_names([*bad, *_format_telemetry(gpu)]), "fail" if held else "warn"
            yield judge("performance.telemetry", not bad, shown, about, status=status, value=gpu.clock_mean_mhz)
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
                yield judge("performance.quickstart/loss", False, "", about)
            elif number in restless:
                status = "unknown" if is_software else "fail"
                yield judge("performance.quickstart/restless", False, "", about, status=status)
            elif number in disputed:
                yield from self._report_disputed_results(check, rank, disputed)
            else:
                equal[rank.node].append(number)
        for ranks in equal.values():
            digests = {done[rank][0].digest for rank in ranks}
            shown = f"{len(ranks)} devices, losses and weights {format_names(sorted(digests))}"
            yield judge(check, True, shown, About(host=self._baseline.find_host(ranks[0])))

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
            about, shown = About(host=host), f"{table.format_number(rate)} GB/s"
            if floor and (rate < floor.value or host not in slow):
                words = {"wanted": format_floor(floor), "floor_source": floor.source, "value": rate}
                yield judge(check, rate >= floor.value, shown, about, **words)
            elif host in slow:
                shown += f", {slow[host].below:.0%} below the median of {len(rates)} nodes"
                yield judge(f"{check}/outlier", False, shown, about, tolerance=SLOW_HOST, value=rate)
            else:
                yield report_info(check, shown, "no floor: the module speed needs root", about, value=rate)

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

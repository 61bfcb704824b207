"""Judge the measured communication between ranks: collectives and pairs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from primus.machine import measurements
from primus.machine.measurements import Collective, Pair, WrongElements
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import format_names, format_ranges
from primus.preflight.findings.rules import About, judge, report_info
from primus.preflight.performance import fault_localization
from primus.preflight.performance.baselines import FLOOR_RANKS, PerformanceBaseline, format_floor
from primus.report import table

SLOW_ON_CPU = 0.9
"""Relative distance below the usual bandwidth at which a pair of CPU processes is reported: the processes share cores
with other programs."""
ALONE = "a single process: start several"


class CommunicationJudge:
    """Findings about the communication between ranks."""

    def __init__(self, baseline: PerformanceBaseline) -> None:
        self._baseline = baseline
        self._results = baseline.results
        self._on_gpu = baseline.on_gpu

    def judge_collectives(self) -> Iterator[CheckFinding]:
        """Bandwidth of each operation in each group of ranks, and the ranks responsible for wrong elements."""
        by_group: dict[tuple[str, tuple[int, ...], str], list[Collective]] = defaultdict(list)
        for found in self._results.collectives:
            by_group[found.scope, found.ranks, found.operation].append(found)
        for (_, ranks, _), sweep in by_group.items():
            if len(ranks) > 1:
                yield from self._judge_sweep(sorted(sweep, key=lambda found: found.size_bytes))
        groups = {(scope, ranks) for scope, ranks, _ in by_group}
        for _, ranks in sorted(groups):
            if len(ranks) == 1:
                about = About(host=self._baseline.find_host(ranks[0]))
                yield report_info("performance.collectives", "single rank", ALONE, about)
        expected = self._report_group_count()
        missing = expected - len(groups)
        if missing > 0:
            yield judge("performance.collectives", False, f"{missing} of {expected}")

    def _report_group_count(self) -> int:
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in self._results.ranks:
            nodes[rank.node].append(rank.rank)
        members = [tuple(sorted(ranks)) for ranks in nodes.values()]
        asked = measurements.list_collective_groups(self._results.asked, members)
        return len({(scope, ranks) for scope, groups in asked for ranks in groups}) or 1

    def _judge_sweep(self, sweep: Sequence[Collective]) -> Iterator[CheckFinding]:
        """Findings about one operation over all sizes in one group."""
        check, about = self._describe_collective(sweep[0])
        timed = [found for found in sweep if found.busbw_gb_per_s is not None]
        for problem in dict.fromkeys(found.problem for found in sweep if found.busbw_gb_per_s is None):
            yield judge("collective/no_time", False, problem or "no time", about, check=check)
        yield from self._report_wrong_elements(check, sweep, about)
        if not timed:
            return
        yield self._judge_bandwidth(check, timed, about)
        if self._on_gpu:
            yield from self._find_dips(check, timed, about)

    def _describe_collective(self, found: Collective) -> tuple[str, About]:
        """Name of the check, and what it concerns."""
        part = f"ranks {format_ranges(found.ranks)}" if self._is_part(found) else ""
        if found.scope == "all":
            return f"performance.{found.operation}_between_nodes", About(part)
        return f"performance.{found.operation}", About(part, self._baseline.find_host(found.ranks[0]))

    def _is_part(self, found: Collective) -> bool:
        """Whether the group is a subset of the ranks of its node or of all ranks."""
        first = self._baseline.ranks.get(found.ranks[0])
        there = [rank for rank in self._results.ranks if found.scope == "all" or (first and rank.node == first.node)]
        return len(found.ranks) < len(there)

    def _report_wrong_elements(self, check: str, sweep: Sequence[Collective], about: About) -> Iterator[CheckFinding]:
        wrong = [entry for found in sweep for entry in found.wrong]
        if not wrong:
            return
        ranks = sweep[0].ranks
        met = [fault_localization.PairResult(a, b, 1.0) for i, a in enumerate(ranks) for b in ranks[i + 1 :]]
        bad = {
            fault_localization.PairResult(min(entry.rank, entry.source), max(entry.rank, entry.source), 1.0)
            for entry in wrong
            if entry.source is not None and entry.source != entry.rank
        }
        count = sum(entry.count for entry in wrong)
        shown = f"{count} wrong elements{self._format_suspects(wrong, met, bad)}"
        yield judge("collective/wrong", False, shown, about, check=check)

    def _format_suspects(
        self,
        wrong: Sequence[WrongElements],
        met: Sequence[fault_localization.PairResult],
        bad: Iterable[fault_localization.PairResult],
    ) -> str:
        """Ranks that sent or received wrong elements; a sum that is wrong on all ranks does not identify the source."""
        blamed = fault_localization.find_culprits(met, bad)
        if blamed:
            return f"; attributed to: {format_names(self._baseline.format_rank_name(rank) for rank in blamed)}"
        receivers = sorted({entry.rank for entry in wrong})
        return f" received by {format_names(self._baseline.format_rank_name(rank) for rank in receivers)}"

    def _judge_bandwidth(self, check: str, timed: Sequence[Collective], about: About) -> CheckFinding:
        """Bus bandwidth of the largest size and time of the smallest, compared with the floor if there is one."""
        shown = f"busbw {_format_busbw(timed[-1])}, {_format_latency(timed[0])}, {len(timed[0].ranks)} ranks"
        floored = [
            (found, floor) for found in timed for floor in [self._baseline.find_collective_floor(found)] if floor
        ]
        for found, floor in floored:
            if (found.busbw_gb_per_s or 0.0) < floor.value:
                expected = f"{format_floor(floor)} at {table.format_size(found.size_bytes)}"
                words = {"wanted": expected, "floor_source": floor.source, "value": found.busbw_gb_per_s}
                return judge("collective", False, f"busbw {_format_busbw(found)}", about, check=check, **words)
        largest = timed[-1].busbw_gb_per_s
        if not floored:
            why = f"floors are of {FLOOR_RANKS} devices of a node" if self._on_gpu else "gloo over the host's network"
            return report_info(check, shown, why, about, value=largest)
        expected = ", ".join(
            f"{format_floor(floor)} at {table.format_size(found.size_bytes)}" for found, floor in floored
        )
        words = {"wanted": expected, "floor_source": floored[-1][1].source, "value": largest}
        return judge("collective", True, shown, about, check=check, **words)

    def _find_dips(self, check: str, timed: Sequence[Collective], about: About) -> Iterator[CheckFinding]:
        by_size = {found.size_bytes: found.busbw_gb_per_s or 0.0 for found in timed}
        for small, large in fault_localization.find_dips(by_size):
            drop = 1 - by_size[large] / by_size[small]
            shown = f"{drop:.0%} lower at {table.format_size(large)} than at {table.format_size(small)}"
            yield judge("collective/dip", False, shown, about, check=f"{check}_dip")

    def judge_pairs(self) -> Iterator[CheckFinding]:
        """Ranks that are slow or wrong with several partners."""
        for between_nodes in (False, True):
            found = [pair for pair in self._results.pairs if pair.between_nodes == between_nodes]
            expected = self._report_pair_count(between_nodes)
            if len(found) < expected:
                shown = f"{expected - len(found)} of {expected}"
                yield judge("pairs/not_measured", False, shown, check=_name_pair_check(between_nodes))
            if found:
                yield from self._judge_pairs(found, between_nodes)
        if self._results.world_size == 1:
            yield report_info("performance.pairs", "single rank", ALONE)

    def _report_pair_count(self, between_nodes: bool) -> int:
        sizes = Counter(rank.node for rank in self._results.ranks)
        if between_nodes:
            return math.comb(len(sizes), 2)
        return sum(math.comb(size, 2) for size in sizes.values())

    def _judge_pairs(self, scan: Sequence[Pair], between_nodes: bool) -> Iterator[CheckFinding]:
        """Ranks that are slow or wrong with several partners, or else the faulty link."""
        check = _name_pair_check(between_nodes)
        results = {
            fault_localization.PairResult(pair.first, pair.second, None if pair.wrong else pair.gb_per_s): pair
            for pair in scan
        }
        below = self._baseline.demands.outlier_percent / 100 if self._on_gpu else SLOW_ON_CPU
        bad = fault_localization.find_bad_pairs(results, below=below)
        blamed = fault_localization.find_culprits(results, bad)
        if not self._on_gpu:  # CPU processes share cores: a single slow pair is not significant
            bad = [result for result in bad if result.value is None or {result.first, result.second} & {*blamed}]
        rates = [pair.gb_per_s for pair in scan if pair.gb_per_s]
        shown = (
            f"{table.format_number(min(rates, default=None))} - "
            f"{table.format_number(max(rates, default=None))} GB/s per direction"
        )
        if not bad:
            yield judge("pairs", True, f"{len(scan)} pairs, {shown}", check=check, value=min(rates))
            return
        for name in blamed:
            yield self._report_slow_member(check, name, [pair for pair in bad if name in pair[:2]], shown)
        for result in bad:
            if result.first not in blamed and result.second not in blamed:
                yield self._report_bad_link(check, results[result], shown)

    def _report_slow_member(
        self, check: str, name: Hashable, bad: Sequence[fault_localization.PairResult], shown: str
    ) -> CheckFinding:
        is_wrong = any(pair.value is None for pair in bad)
        slowest = min((pair.value for pair in bad if pair.value is not None), default=None)
        what = "wrong or no data" if is_wrong else f"down to {table.format_number(slowest)} GB/s"
        partners = format_names(f"rank {pair.second if pair.first == name else pair.first}" for pair in bad)
        about = About(self._baseline.format_rank_name(name), self._baseline.find_host(name))
        words = {"check": check, "status": "fail" if is_wrong or self._on_gpu else "warn", "value": slowest}
        return judge("pairs/member", False, f"{what} with {partners}, where all pairs have {shown}", about, **words)

    def _report_bad_link(self, check: str, pair: Pair, shown: str) -> CheckFinding:
        what = f"{pair.wrong} wrong elements" if pair.wrong else f"{table.format_number(pair.gb_per_s)} GB/s"
        about = About(" with ".join(self._baseline.format_rank_name(rank) for rank in (pair.first, pair.second)))
        words = {"check": check, "status": "fail" if pair.wrong else "warn", "value": pair.gb_per_s}
        return judge("pairs/link", False, f"{what}, where all pairs have {shown}", about, **words)


def _format_busbw(found: Collective) -> str:
    return f"{table.format_number(found.busbw_gb_per_s)} GB/s at {table.format_size(found.size_bytes)}"


def _format_latency(found: Collective) -> str:
    return f"{table.format_number((found.time_s or 0.0) * 1e6)} us at {table.format_size(found.size_bytes)}"


def _name_pair_check(between_nodes: bool) -> str:
    return "performance.pairs_between_nodes" if between_nodes else "performance.pairs"

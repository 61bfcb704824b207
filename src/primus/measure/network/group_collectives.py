"""Bandwidth of collectives in groups of ranks."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec import Struct, structs

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue, RankCallTimes
from primus.measure.kernels.gemm import DTYPES
from primus.measure.network import collectives
from primus.measure.network.collectives import OPERATIONS, Buffers, Operation, RankGroup
from primus.measure.network.rank_groups import check_backend, create_group, list_nodes
from primus.measure.timing import Clock, create_clock, summarize_samples
from primus.report.table import format_size
from primus.statistics import compute_quantile

NUM_LOOPS = 10
"""Loops of back-to-back calls, whose times give the interval."""
PATIENCE = timedelta(minutes=30)
"""Time after which a collective of a group counts as hung; each case has the shorter limit of the benchmark."""


class CollectiveCases(Struct, frozen=True, kw_only=True):
    """What is measured in each group."""

    operations: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    """Sizes of the largest side."""
    dtype: str
    num_repeats: int = 1
    """Rows of each operation and size."""
    has_total: bool = False
    """Whether a further row has the samples of all repeats."""
    backend: str | None = None
    """Backend of torch.distributed; None for the usual one of the device."""


class CollectiveEffort(Struct, frozen=True, kw_only=True):
    """How often a collective is called, and what is kept of it."""

    warm_up_calls: int
    calls: int
    longest_s: float
    checks: bool = True
    reports_ranks: bool = False
    traced: frozenset[tuple[str, int]] = frozenset()
    """Operations and sizes of which each call is timed by itself, too."""
    most_traced: int = 0
    """Calls of each that are kept; 0 keeps all."""


class GroupMembers(NamedTuple):
    """Ranks that communicate in one measurement, concurrently with those of other groups."""

    name: str
    groups: list[tuple[int, ...]]


def measure_collectives(
    context: BenchmarkContext,
    cases: CollectiveCases,
    effort: CollectiveEffort,
    *,
    by_node: bool = False,
    stride: int | None = None,
    one_by_one: bool = False,
) -> Iterator[BenchmarkRow]:
    """A row for each operation, size and group, on the first rank of the group.

    Args:
        by_node: Whether the ranks of each node are a group.
        stride: Distance of the ranks of strided groups; None for other groups.
        one_by_one: Whether groups run one after another.

    Raises:
        UnfitError: The backend cannot be used here.
        PrimusError: The buffers exceed the free memory.
    """
    everyone = _make_everyone(context)
    if cases.backend is not None:
        check_backend(cases.backend, context.device)
    nodes = list_nodes(context.rank - context.local_rank, everyone) if by_node else None
    rounds = list_groups(context.world_size, nodes, stride)
    if one_by_one:
        rounds = [GroupMembers(each.name, [ranks]) for each in rounds for ranks in each.groups]
    for name, groups in rounds:
        group = create_group("all", groups, everyone, PATIENCE, cases.backend)
        for operation, size_bytes in itertools.product(cases.operations, cases.sizes_bytes):
            what = f"{operation} of {format_size(size_bytes)}"
            context.count_sets(
                2 * size_bytes, "warm"
            )  # refuses what does not fit: one rank alone would block the others
            case: dict[str, CaseValue] = {"op": operation, "dtype": cases.dtype, "group": name}
            measured: list[GroupTimes] = []
            for repeat in range(cases.num_repeats):
                whole = {**case, "repeat": repeat + 1} if cases.num_repeats > 1 else case
                context.wait_for_all(what)
                if group is None:
                    continue
                with context.limit_time(f"{what} among {group.size} ranks"):
                    found = measure_group(operation, size_bytes, group, DTYPES[cases.dtype], effort, whole)
                measured.append(found)
                if group.member == 0:
                    yield found.row
            if cases.has_total and group is not None and group.member == 0 and all(each.loops for each in measured):
                loops = [loop for each in measured for loop in each.loops]
                whole = {**measured[0].row.case, "repeat": "all"}
                yield _build_row(operation, group, loops, whole)


def list_groups(world_size: int, nodes: Sequence[tuple[int, ...]] | None, stride: int | None) -> list[GroupMembers]:
    """The groups of ranks: of each node, each `stride`-th, or all."""
    if nodes is not None:
        return [GroupMembers("node", list(nodes))]
    if stride is not None:
        groups = [tuple(range(first, world_size, stride)) for first in range(min(stride, world_size))]
        return [GroupMembers(f"strided {stride}", groups)]
    return [GroupMembers("all", [tuple(range(world_size))])]


class GroupTimes(NamedTuple):
    """What a group has measured of one operation and size."""

    row: BenchmarkRow
    loops: list[list[float]]
    """Seconds of a call of each rank, by loop; empty if the case failed."""


def measure_group(
    name: str, size_bytes: int, group: RankGroup, dtype: torch.dtype, effort: CollectiveEffort,
    case: dict[str, CaseValue],
) -> GroupTimes:  # fmt: skip
    """The row of one operation and size; every member of `group` gets the same."""
    operation, n = OPERATIONS[name], group.size
    is_traced = (name, size_bytes) in effort.traced
    size_bytes = collectives.round_bytes(size_bytes, n, dtype)
    whole = {**case, "first_rank": group.ranks[0], "ranks": n, "size_bytes": size_bytes}
    if n == 1:
        # By the formula the bandwidth would be 0, which looks like a measured one.
        return GroupTimes(BenchmarkRow(case=whole, problem="single rank: no peer to communicate with"), [])
    buffers = collectives.create_fresh_buffers(operation, size_bytes, group, dtype)
    if problem := collectives.launch_first(operation.launch, buffers, group):
        return GroupTimes(BenchmarkRow(case=whole, problem=problem.splitlines()[0]), [])
    # On fresh buffers: calls of the timed loops reduce the same buffers again.
    wrong = collectives.gather_wrong_elements(operation, buffers, group) if effort.checks else []
    loops = _time_loops(operation, buffers, group, effort)
    calls = _time_single_calls(operation, buffers, group, effort) if is_traced else []
    row = _build_row(name, group, loops, whole)
    figures = dict(row.figures)
    by_rank = _list_rank_times(group, loops, calls, effort) if effort.reports_ranks or is_traced else ()
    if effort.reports_ranks:
        figures |= {f"rank_{each.rank}_us": statistics.median(each.loops_s) * 1e6 for each in by_rank}
    if calls:
        figures["call_p99_us"] = compute_quantile(sorted(max(times) for times in calls), 0.99) * 1e6
    num_wrong = sum(each.count for each in wrong)
    row = structs.replace(
        row,
        figures=figures,
        by_rank=by_rank,
        wrong=num_wrong,
        problem=f"{num_wrong} wrong elements, first at rank {wrong[0].rank}" if wrong else "",
    )
    return GroupTimes(row, loops)


def _list_rank_times(
    group: RankGroup, loops: Sequence[Sequence[float]], calls: Sequence[Sequence[float]], effort: CollectiveEffort
) -> tuple[RankCallTimes, ...]:
    kept = calls[: effort.most_traced or len(calls)]
    return tuple(
        RankCallTimes(rank=rank, loops_s=tuple(times[i] for times in loops), calls_s=tuple(times[i] for times in kept))
        for i, rank in enumerate(group.ranks)
    )


def _build_row(
    name: str, group: RankGroup, loops: Sequence[Sequence[float]], case: dict[str, CaseValue]
) -> BenchmarkRow:
    """Bandwidths by the time of the slowest rank of each loop."""
    size_bytes = case["size_bytes"]
    assert isinstance(size_bytes, int)
    timing = summarize_samples([max(times) for times in loops])
    spread = [max(times) / min(times) for times in loops if min(times) > 0]

    def compute_busbw(seconds: float) -> float:
        return collectives.compute_bus_bandwidth(name, size_bytes, seconds, group.size) or 0.0

    low_s, high_s = timing.interval_s or (timing.median_s, timing.median_s)
    return BenchmarkRow(
        case=case,
        moved_bytes=size_bytes,
        value=compute_busbw(timing.median_s),
        unit="GB/s",
        interval=(compute_busbw(high_s), compute_busbw(low_s)),
        timing=timing,
        figures={
            "algbw_gb_per_s": collectives.compute_algorithm_bandwidth(size_bytes, timing.median_s),
            "busbw_gb_per_s": compute_busbw(timing.median_s),
            "slowest_to_fastest_rank": sorted(spread)[len(spread) // 2] if spread else 1.0,
        },
        convention="size: bytes of the largest side; algbw = size / time of the slowest rank; busbw = algbw x 2(n-1)/n "
        "(all_reduce), (n-1)/n (all_gather, reduce_scatter, all_to_all), 1 (others), as nccl-tests counts; GB = 1e9 B",
    )


def _time_loops(
    operation: Operation, buffers: Buffers, group: RankGroup, effort: CollectiveEffort
) -> list[list[float]]:
    """Seconds per call of each rank, for each loop."""
    clock = create_clock(group.device)

    def call() -> None:
        operation.launch(buffers, group)

    warm_s = max(collectives.time_loop(call, clock, effort.warm_up_calls, group))
    # Every rank computes the same numbers from the slowest rank's time: a different number of calls would deadlock.
    calls = max(NUM_LOOPS, min(effort.calls, math.ceil(effort.longest_s / warm_s)))
    return [collectives.time_loop(call, clock, calls // NUM_LOOPS, group) for _ in range(NUM_LOOPS)]


def _time_single_calls(
    operation: Operation, buffers: Buffers, group: RankGroup, effort: CollectiveEffort
) -> list[list[float]]:
    """Seconds of each rank for single calls, each after a barrier."""
    clock: Clock = create_clock(group.device)
    return [
        collectives.time_loop(lambda: operation.launch(buffers, group), clock, 1, group) for _ in range(effort.calls)
    ]


def _make_everyone(context: BenchmarkContext) -> RankGroup:
    handle = dist.group.WORLD if context.world_size > 1 else None
    return RankGroup("all", tuple(range(context.world_size)), context.rank, context.device, handle)

"""Collectives among the ranks of the launch, by the conventions of nccl-tests: GB/s (alias: rccl)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from msgspec import Meta

from primus.benchmark import (
    BenchmarkContext,
    BenchmarkOptions,
    BenchmarkResult,
    BenchmarkRow,
    CaseValue,
    RankCallTimes,
    check_choice,
    parse_byte_sizes,
)
from primus.errors import UsageError
from primus.report.benchmark_files import TABLES, find_suffix, find_table_suffix
from primus.statistics import compute_quantile

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
SPELLINGS = {"alltoall": "all_to_all", "sendrecv": "send_recv", "allreduce": "all_reduce", "allgather": "all_gather"}
QUICK_SIZES = "64K,1M"


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark collectives`."""

    op: tuple[str, ...] = OPERATIONS
    """Operations: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv."""
    sizes: str | None = None
    """Sizes of the largest side, separated by commas: 1K,64M,8G."""
    min_bytes: str = "1K"
    """Smallest size without --sizes."""
    max_bytes: str = "128M"
    """Largest size without --sizes."""
    num_sizes: Annotated[int, Meta(ge=1, le=64)] = 12
    """Number of sizes without --sizes."""
    scale: Literal["log2", "linear"] = "log2"
    """Spacing of the sizes without --sizes."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type."""
    group: Literal["all", "node", "strided"] = "all"
    """Ranks that communicate: all; those of each node; or each --stride-th, as data-parallel groups do."""
    stride: Annotated[int, Meta(ge=1)] = 8
    """Distance of the ranks of a strided group."""
    warmup: Annotated[int, Meta(ge=1)] = 20
    """Calls before the measurement."""
    iters: Annotated[int, Meta(ge=1)] = 100
    """Calls of the measurement, at most; --duration limits its time."""
    repeat: Annotated[int, Meta(ge=1)] = 1
    """Measurements of each case, each of which is a row."""
    aggregate_repeat: bool = False
    """Also report a row with the samples of all repeats."""
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    """Backend of torch.distributed (default: nccl, also for RCCL, on GPUs, and gloo on CPUs)."""
    cluster: str = ""
    """Label of the cluster, which the result keeps (default: $PRIMUS_CLUSTER)."""
    check: bool = True
    """Check every element of the first call on fresh buffers."""
    per_rank: bool = False
    """Also report the time of each rank."""
    per_rank_file: str | None = None
    """File for the times of each rank (default with --per-rank: the output file with _rank in its name)."""
    per_iter_trace: bool = False
    """Also time each call by itself, and report the 99th percentile."""
    trace_file: str | None = None
    """File for the times of each call (default with --per-iter-trace: the output file with _trace in its name)."""
    trace_limit: Annotated[int, Meta(ge=0)] = 0
    """Calls of each operation and size in that file; 0 for all."""
    trace_ops: str = ""
    """Operations to trace, separated by commas (default: all)."""
    trace_sizes: str = ""
    """Sizes to trace, separated by commas (default: all)."""


def check_options(options: Options) -> None:
    """Refuse unknown operations and sizes, and files that hold no table."""
    _list_traced(options)
    for path in filter(None, (options.per_rank_file, options.trace_file)):
        find_table_suffix(path)


def _list_operations(words: Iterable[str], option: str) -> tuple[str, ...]:
    names = [part.strip() for word in words for part in word.split(",") if part.strip()]
    return tuple(check_choice(SPELLINGS.get(name, name), OPERATIONS, option) for name in names)


def _list_traced(options: Options) -> frozenset[tuple[str, int]]:
    """Operations and sizes whose calls are timed one by one."""
    operations, sizes = set(_list_operations(options.op, "--op")), set(_list_sizes(options))
    traced_operations = set(_list_operations([options.trace_ops], "--trace-ops")) or operations
    traced_sizes = set(parse_byte_sizes(options.trace_sizes, "--trace-sizes")) if options.trace_sizes else sizes
    if not (traced_operations <= operations and traced_sizes <= sizes):
        raise UsageError("--trace-ops, --trace-sizes: not measured", "choose from --op and the sizes")
    if not (options.per_iter_trace or options.trace_file):
        return frozenset()
    return frozenset(itertools.product(traced_operations, traced_sizes))


def _list_sizes(options: Options) -> list[int]:
    if options.quick and options.sizes is None:
        return parse_byte_sizes(QUICK_SIZES, "--sizes")
    if options.sizes is not None:
        return parse_byte_sizes(options.sizes, "--sizes")
    first = parse_byte_sizes(options.min_bytes, "--min-bytes")[0]
    last = parse_byte_sizes(options.max_bytes, "--max-bytes")[0]
    if last < first:
        raise UsageError(f"--max-bytes {options.max_bytes} is smaller than --min-bytes {options.min_bytes}")
    steps = max(1, options.num_sizes - 1)
    if options.scale == "linear":
        found = [first + (last - first) * step // steps for step in range(options.num_sizes)]
    else:
        found = [round(first * (last / first) ** (step / steps)) for step in range(options.num_sizes)]
    return sorted(set(found))


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each operation, size and group, on the first rank of the group."""
    from primus.measure.network.group_collectives import CollectiveCases, CollectiveEffort, measure_collectives

    effort = CollectiveEffort(
        warm_up_calls=5 if options.quick else options.warmup,
        calls=20 if options.quick else options.iters,
        longest_s=min(options.duration, 0.3 if options.quick else options.duration),
        checks=options.check,
        reports_ranks=options.per_rank or options.per_rank_file is not None,
        traced=_list_traced(options),
        most_traced=options.trace_limit,
    )
    cases = CollectiveCases(
        operations=_list_operations(options.op, "--op"),
        sizes_bytes=tuple(_list_sizes(options)),
        dtype=options.dtype,
        num_repeats=options.repeat,
        has_total=options.aggregate_repeat and options.repeat > 1,
        backend=options.backend,
    )
    stride = options.stride if options.group == "strided" else None
    yield from measure_collectives(context, cases, effort, by_node=options.group == "node", stride=stride)


def list_tables(options: Options, result: BenchmarkResult) -> dict[str, list[dict[str, CaseValue]]]:
    """The times of ranks and of calls, in the files that the options name."""
    hosts = {rank.rank: rank.host for rank in result.ranks}
    tables: dict[str, list[dict[str, CaseValue]]] = {}
    ranks_path = options.per_rank_file or (_derive_path(options, "_rank", ".csv") if options.per_rank else None)
    if ranks_path:
        tables[ranks_path] = [
            {**row.case, "rank": times.rank, "host": hosts.get(times.rank, ""), **_summarize_times(row, times)}
            for row in result.rows
            for times in row.by_rank
        ]
    trace_path = options.trace_file or (_derive_path(options, "_trace", ".jsonl") if options.per_iter_trace else None)
    if trace_path:
        tables[trace_path] = [
            {**row.case, "rank": times.rank, "host": hosts.get(times.rank, ""), "call": call, "time_us": seconds * 1e6}
            for row in result.rows
            for times in row.by_rank
            for call, seconds in enumerate(times.calls_s)
        ]
    return tables


def _summarize_times(row: BenchmarkRow, times: RankCallTimes) -> dict[str, CaseValue]:
    samples = sorted(times.calls_s or times.loops_s)
    median_s, p95_s = (compute_quantile(samples, share) for share in (0.5, 0.95))
    found: dict[str, CaseValue] = {"median_us": median_s * 1e6, "p95_us": p95_s * 1e6}
    found |= {"min_us": samples[0] * 1e6, "max_us": samples[-1] * 1e6}
    return {**found, "p95_to_group_median": p95_s / row.timing.median_s if row.timing else None}


def _derive_path(options: Options, suffix: str, default: str) -> str | None:
    """The first output file with `suffix` in its name; None without one."""
    path = next((path for path in options.output_file if path != "-"), None)
    if path is None:
        return None
    ending = find_suffix(path)
    is_table = ending.removesuffix(".gz") in TABLES
    return f"{path[: -len(ending)]}{suffix}{path[-len(ending) :] if is_table else default}"

"""Collectives among the ranks of the launch, by the conventions of nccl-tests: GB/s (alias: rccl)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, check_choice, parse_byte_sizes
from primus.errors import UsageError

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
    cluster: str = ""
    """Label of the cluster, which the result keeps."""
    check: bool = True
    """Check every element of the first call on fresh buffers."""
    per_rank: bool = False
    """Also report the time of each rank."""
    per_iter_trace: bool = False
    """Also time each call by itself, and report the 99th percentile."""


def check_options(options: Options) -> None:
    """Refuse unknown operations and sizes."""
    _list_operations(options)
    _list_sizes(options)


def _list_operations(options: Options) -> list[str]:
    words = [part for word in options.op for part in word.split(",")]
    return [check_choice(SPELLINGS.get(word, word), OPERATIONS, "--op") for word in words]


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
    from primus.measure.group_collectives import CollectiveEffort, measure_collectives

    effort = CollectiveEffort(
        warm_up_calls=5 if options.quick else options.warmup,
        calls=20 if options.quick else options.iters,
        longest_s=min(options.duration, 0.3 if options.quick else options.duration),
        checks=options.check,
        reports_ranks=options.per_rank,
        times_each_call=options.per_iter_trace,
    )
    operations, sizes = _list_operations(options), _list_sizes(options)
    stride = options.stride if options.group == "strided" else None
    yield from measure_collectives(
        context,
        operations,
        sizes,
        options.dtype,
        effort,
        by_node=options.group == "node",
        stride=stride,
        num_repeats=options.repeat,
    )

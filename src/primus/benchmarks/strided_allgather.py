"""All-gathers in groups of every n-th rank, one group after another or all at once: GB/s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, parse_sizes


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark strided-allgather`."""

    sizes_mb: str = "64,128,256"
    """Sizes that each rank sends, in MiB, separated by commas."""
    stride: Annotated[int, Meta(ge=1)] = 8
    """Distance of the ranks of a group."""
    parallel: bool = False
    """All groups at once instead of one after another."""
    iters: Annotated[int, Meta(ge=1)] = 50
    """Calls of the measurement, at most; --duration limits its time."""
    warmup: Annotated[int, Meta(ge=1)] = 10
    """Calls before the measurement."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type."""
    backend: Literal["nccl", "gloo", "mpi"] | None = None
    """Backend of torch.distributed (default: nccl, also for RCCL, on GPUs, and gloo on CPUs)."""


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive."""
    parse_sizes(options.sizes_mb, "--sizes-mb")


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each size and group."""
    from primus.measure.network.group_collectives import CollectiveCases, CollectiveEffort, measure_collectives

    effort = CollectiveEffort(warm_up_calls=options.warmup, calls=options.iters, longest_s=options.duration)
    # Of the largest group; the size of a collective is that of what all ranks of a group receive.
    num_ranks = -(-context.world_size // options.stride)
    sizes = tuple(num_ranks * (size << 20) for size in parse_sizes(options.sizes_mb, "--sizes-mb"))
    cases = CollectiveCases(operations=("all_gather",), sizes_bytes=sizes, dtype=options.dtype, backend=options.backend)
    yield from measure_collectives(context, cases, effort, stride=options.stride, one_by_one=not options.parallel)

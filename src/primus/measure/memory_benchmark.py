"""Benchmarks of memory: the kernels of STREAM, and copies between host and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec import structs

from primus.benchmark import BenchmarkContext, BenchmarkRow, MeasuredCall, Mode
from primus.measure import memory
from primus.measure.device import find_array_bytes
from primus.report.table import format_size

CAN_BE_CACHED = ": smaller than four caches, the rate includes cache hits"


def measure_kernels(
    context: BenchmarkContext, kernels: Sequence[str], array_bytes: int | None
) -> Iterator[BenchmarkRow]:
    """A row for each kernel on three arrays of fp32; the arrays exceed the cache, so that every call finds it cold.

    Args:
        array_bytes: Size of an array; None for one that exceeds the cache.
    """
    cache_bytes = context.cache_bytes
    if array_bytes is None:
        elements = memory.array_elements(cache_bytes, find_array_bytes(context.device, context.num_local))
    else:
        elements = max(1, array_bytes // 4)

    def make_call(mode: Mode) -> MeasuredCall:
        context.count_sets(3 * 4 * elements, "warm")  # refuses what does not fit
        arrays = memory.allocate_arrays(context.device, elements)
        arrays.c.fill_(float("nan"))
        kernel = memory.KERNELS[name]
        cached = "" if arrays.a.nbytes >= memory.CACHES_IN_ARRAY * cache_bytes else CAN_BE_CACHED
        return MeasuredCall(
            call=lambda: kernel.run(arrays),
            moved_bytes=kernel.arrays_moved * arrays.a.nbytes,
            value="bytes",
            check=lambda: memory.wrong_elements(name, kernel, arrays),
            convention=f"copy and mul 2N, add and triad 3N, dot 2N bytes / median time; arrays of N = "
            f"{format_size(arrays.a.nbytes)} fp32, normal random, last-level cache {format_size(cache_bytes)}{cached}",
        )

    for name in kernels:
        yield from context.measure({"kernel": name, "array_mib": 4 * elements / 2**20}, make_call, modes=("steady",))


def measure_copies(context: BenchmarkContext, directions: Sequence[str], num_bytes: int) -> Iterator[BenchmarkRow]:
    """A row for each direction between the device and page-locked host memory."""

    def make_call(mode: Mode) -> MeasuredCall:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).random_()
        there = host.to(context.device)
        target, source = (there, host) if direction == "host_to_device" else (host, there)
        return MeasuredCall(
            call=lambda: target.copy_(source, non_blocking=True),
            moved_bytes=num_bytes,
            value="bytes",
            check=lambda: int((target != source.to(target.device)).sum()),
            convention="N bytes / median time of a copy with page-locked host memory, one direction at a time",
        )

    for direction in directions:
        for row in context.measure({"kernel": direction, "array_mib": num_bytes / 2**20}, make_call, modes=("steady",)):
            yield _without_memory_peak(row)


def _without_memory_peak(row: BenchmarkRow) -> BenchmarkRow:
    """The row without the device's memory as limit: a copy is limited by the link to the host."""
    return structs.replace(row, peak=None, share=None, bound="")

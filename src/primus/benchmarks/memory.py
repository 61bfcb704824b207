"""Memory of the device by the kernels of STREAM: GB/s; with copies between host and device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, structs

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, MeasuredCall, Mode, check_choice
from primus.report.table import format_size

KERNELS = ("copy", "mul", "add", "triad", "dot")
COPIES = ("host_to_device", "device_to_host")
CAN_BE_CACHED = ": smaller than four caches, the rate includes cache hits"


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark memory`."""

    kernels: str = "copy,mul,add,triad,dot"
    """Kernels of STREAM and BabelStream, separated by commas."""
    array_mib: Annotated[float, Meta(gt=0)] | None = None
    """Size of an array, in MiB (default: four last-level caches, at least 256 MiB)."""
    copies: bool = True
    """Also measure copies between the device and page-locked host memory."""
    copy_mib: Annotated[float, Meta(gt=0)] = 256.0
    """Size of such a copy, in MiB."""


def check_options(options: Options) -> None:
    """Refuse unknown kernels."""
    for name in options.kernels.split(","):
        check_choice(name, KERNELS, "--kernels")


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each kernel, and for each direction of copies."""
    yield from _measure_kernels(options, context)
    if options.copies and context.device.type == "cuda":
        yield from _measure_copies(context, int(options.copy_mib * 2**20))


def _measure_kernels(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """Kernels on three arrays of fp32; the arrays exceed the cache, so that every call finds it cold."""
    from primus.measure.devices import memory
    from primus.measure.devices.device import find_array_bytes

    cache_bytes = context.cache_bytes
    if options.array_mib is None:
        elements = memory.count_array_elements(cache_bytes, find_array_bytes(context.device, context.num_local))
    else:
        elements = max(1, int(options.array_mib * 2**20) // 4)

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

    for name in options.kernels.split(","):
        yield from context.measure({"kernel": name, "array_mib": 4 * elements / 2**20}, make_call, modes=("steady",))


def _measure_copies(context: BenchmarkContext, num_bytes: int) -> Iterator[BenchmarkRow]:
    """Copies between the device and page-locked host memory, one direction at a time."""
    import torch

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

    for direction in COPIES:
        for row in context.measure({"kernel": direction, "array_mib": num_bytes / 2**20}, make_call, modes=("steady",)):
            # A copy is limited by the link to the host, not by the device's memory.
            yield structs.replace(row, peak=None, share=None, bound="")

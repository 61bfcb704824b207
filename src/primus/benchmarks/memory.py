"""Memory of the device by the kernels of STREAM: GB/s; with copies between host and device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, check_choice

KERNELS = ("copy", "mul", "add", "triad", "dot")
COPIES = ("host_to_device", "device_to_host")


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
    from primus.measure import memory_benchmark

    array_bytes = int(options.array_mib * 2**20) if options.array_mib else None
    yield from memory_benchmark.measure_kernels(context, options.kernels.split(","), array_bytes)
    if options.copies and context.device.type == "cuda":
        yield from memory_benchmark.measure_copies(context, COPIES, int(options.copy_mib * 2**20))

"""Bandwidth of device memory and of copies between memories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from primus.machine.measurements import MeasuredFigure
from primus.measure.timing import MeasuredDevice, measure_call

SCALAR = 0.4
"""Value in BabelStream, which also defines the operations, their names and the bytes counted (UoB-HPC/BabelStream,
README)."""
CACHES_IN_ARRAY = 4
"""Arrays are at least this many times the last-level cache (STREAM's rule, cs.virginia.edu/stream/ref.html)."""
MOST_PEER_COPIES = 16
"""Maximum number of ranks of a node that copy concurrently: one per device of the largest servers."""
CHECKED_AT_ONCE = 2**24
"""Elements converted to fp64 at a time in a check."""


class Arrays(NamedTuple):
    """a and b are read, c is written; `total` holds the result of dot."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    total: torch.Tensor


class Kernel(NamedTuple):
    """One of BabelStream's operations."""

    arrays_moved: int
    """Bytes moved, in sizes of an array."""
    formula: str
    run: Callable[[Arrays], object]
    expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The expected c for a and b."""


KERNELS: dict[str, Kernel] = {
    "copy": Kernel(2, "c = a", lambda x: x.c.copy_(x.a), lambda a, b: a),
    "mul": Kernel(2, "c = s b", lambda x: torch.mul(x.b, SCALAR, out=x.c), lambda a, b: SCALAR * b),
    "add": Kernel(3, "c = a + b", lambda x: torch.add(x.a, x.b, out=x.c), lambda a, b: a + b),
    "triad": Kernel(
        3, "c = a + s b", lambda x: torch.add(x.a, x.b, alpha=SCALAR, out=x.c), lambda a, b: a + SCALAR * b
    ),
    "dot": Kernel(2, "sum a b", lambda x: torch.dot(x.a, x.b, out=x.total), lambda a, b: a * b),
}


def run(measured: MeasuredDevice, kernels: Mapping[str, Kernel] = KERNELS) -> Iterator[MeasuredFigure]:
    """GB/s of each kernel, on three arrays of fp32."""
    cache_bytes = measured.cache_bytes
    arrays = allocate_arrays(measured.device, count_array_elements(cache_bytes, measured.max_bytes))
    array_bytes = arrays.a.nbytes
    for name, kernel in kernels.items():
        arrays.c.fill_(float("nan"))
        timing = measure_call(partial(kernel.run, arrays), measured.clock, measured.effort)
        wrong = wrong_elements(name, kernel, arrays)
        yield MeasuredFigure(
            test=f"memory_{name}",
            value=kernel.arrays_moved * array_bytes / timing.median_s / 1e9,
            unit="GB/s",
            convention=f"{kernel.arrays_moved}N / median time, {kernel.formula}, fp32 normal random, arrays of N = "
            f"{array_bytes / 2**20:.0f} MiB, last-level cache {cache_bytes / 2**20:.0f} MiB"
            + ("" if array_bytes >= CACHES_IN_ARRAY * cache_bytes else ": the rate includes cache hits"),
            timing=timing,
            wrong=wrong,
            problem=f"{wrong} elements are wrong" if wrong else "",
        )


def count_array_elements(cache_bytes: int, max_bytes: int) -> int:
    """Elements of an array: enough to exceed the cache if three arrays fit into `max_bytes`."""
    wanted = max(CACHES_IN_ARRAY * cache_bytes, 256 * 2**20)  # BabelStream's default size for small caches
    return max(1, min(wanted, max_bytes // 3) // 4)


def allocate_arrays(device: torch.device, num_elements: int) -> Arrays:
    """Arrays of random values; zeros would give better rates than real data."""
    generator = torch.Generator(device).manual_seed(0)
    a = torch.empty(num_elements, device=device).normal_(generator=generator)
    b = torch.empty(num_elements, device=device).normal_(generator=generator)
    return Arrays(a, b, torch.empty_like(a), torch.full((), float("nan"), device=device))


def wrong_elements(name: str, kernel: Kernel, arrays: Arrays) -> int:
    """Number of elements that differ from fp64 by more than fp32 rounding; all elements are checked."""
    resolution = torch.finfo(torch.float32).eps
    wrong, total, size = 0, 0.0, 0.0
    for begin in range(0, len(arrays.a), CHECKED_AT_ONCE):
        part = slice(begin, begin + CHECKED_AT_ONCE)
        a, b = arrays.a[part].double(), arrays.b[part].double()
        expected = kernel.expected(a, b)
        if name == "dot":
            total, size = total + float(expected.sum()), size + float(expected.abs().sum())
            continue
        near = (arrays.c[part].double() - expected).abs() <= 4 * resolution * (a.abs() + b.abs())
        wrong += int((~near).sum())
    if name == "dot":  # libraries sum in blocks; 0.1 % of the absolute sum is far above their error
        wrong = int(not abs(float(arrays.total) - total) <= 1e-3 * size)
    return wrong


def measure_host_copies(measured: MeasuredDevice, num_bytes: int) -> Iterator[MeasuredFigure]:
    """GB/s between the device and page-locked host memory, one direction at a time."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).random_()
    there = torch.empty_like(host, device=measured.device)
    back = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    for name, target, source in (("host_to_device", there, host), ("device_to_host", back, there)):
        yield _measure_copy(name, target, source, measured, "pinned")


def find_peer(local_rank: int, num_local: int) -> int | None:
    """The device that a rank of a node copies to: the next one; None if it does not copy.

    Each copy opens a second context, on the other device. Of the 64 partitions of a node in CPX mode every fourth
    copies, to the one four further on: half of these copies are between GPUs.
    """
    step = math.ceil(num_local / MOST_PEER_COPIES)
    if num_local < 2 or local_rank % step:
        return None
    following = local_rank + step
    return following if following < num_local else 0


def peer_copy(measured: MeasuredDevice, peer: torch.device, num_bytes: int) -> MeasuredFigure:
    """GB/s from the device to the memory of `peer`."""
    device = measured.device
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty(num_bytes, dtype=torch.uint8, device=peer)
    return _measure_copy("peer_copy", target, source, measured, f"{device} to {peer}, all pairs of the node at once")


def _measure_copy(
    name: str, target: torch.Tensor, source: torch.Tensor, measured: MeasuredDevice, how: str
) -> MeasuredFigure:
    # non_blocking: with page-locked memory the copy is only queued, as the clock expects.
    timing = measure_call(lambda: target.copy_(source, non_blocking=True), measured.clock, measured.effort)
    wrong = int((target != source.to(target.device)).sum())
    return MeasuredFigure(
        test=name,
        value=source.nbytes / timing.median_s / 1e9,
        unit="GB/s",
        convention=f"N / median time, N = {source.nbytes / 2**20:.0f} MiB, {how}",
        timing=timing,
        wrong=wrong,
        problem=f"{wrong} bytes are wrong" if wrong else "",
    )


def read_host_cache_bytes(root: Path = Path("/")) -> int:
    """Size of the first processor's last-level cache; 32 MiB if the kernel does not report it."""
    sizes = {}
    for index in root.glob("sys/devices/system/cpu/cpu0/cache/index*"):
        try:
            level = int((index / "level").read_text())
            sizes[level] = int((index / "size").read_text().strip().removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sizes[max(sizes)] if sizes else 32 * 2**20

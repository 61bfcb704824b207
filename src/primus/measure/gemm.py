"""Rate of matrix products on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from primus.machine.measurements import Dtype, MeasuredFigure
from primus.measure.timing import Clock, Effort, measure_call

SEED = 1234
CHECKED_ROWS = 8
DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Writes the product of the first two matrices into the third."""


class Operands(NamedTuple):
    """a x b -> out, all square."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


def multiply_matrices(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The product by the library that training uses: cuBLAS, hipBLASLt or oneDNN."""
    torch.mm(a, b, out=out)


def run(
    device: torch.device,
    size: int,
    dtype: Dtype,
    clock: Clock,
    effort: Effort,
    *,
    cache_bytes: int,
    max_bytes: int,
    multiply: Multiply = multiply_matrices,
) -> MeasuredFigure:
    """TFLOP/s of back-to-back products of square matrices, with rotating operands.

    Args:
        cache_bytes: Size of the last-level cache, which the operands must exceed.
        max_bytes: Limit of the memory for operands.
        multiply: The product to measure.
    """
    sets = create_operands(device, size, DTYPES[dtype], cache_bytes, max_bytes)
    rotation = OperandRotation(sets)
    timing = measure_call(lambda: multiply(*rotation.take_next()), clock, effort)
    wrong = sum(wrong_elements(checked) for checked in (sets[1], rotation.latest))
    rotated_bytes = len(sets) * _set_bytes(size, DTYPES[dtype])
    return MeasuredFigure(
        test=f"gemm_{dtype}",
        value=count_flop(size, size, size) / timing.median_s / 1e12,
        unit="TFLOP/s",
        convention=f"2MNK / median time, M=N=K={size}, {dtype} in and out, not transposed, normal random, seed {SEED}, "
        f"steady, {len(sets)} rotating sets of operands in {rotated_bytes / 2**20:.0f} MiB, last-level cache "
        f"{cache_bytes / 2**20:.0f} MiB" + ("" if rotated_bytes > cache_bytes else ": the rate includes cache hits"),
        timing=timing,
        wrong=wrong,
        problem=f"{wrong} elements differ from the product in fp64" if wrong else "",
    )


def count_flop(m: int, n: int, k: int) -> int:
    """Multiplications and additions of an m x k by k x n product."""
    return 2 * m * n * k


def num_sets(size: int, dtype: torch.dtype, cache_bytes: int, max_bytes: int) -> int:
    """Number of operand sets so that a set is no longer cached when it is used again; at least two."""
    one = _set_bytes(size, dtype)
    return max(2, min(math.ceil(cache_bytes / one) + 1, max_bytes // one))


def create_operands(
    device: torch.device, size: int, dtype: torch.dtype, cache_bytes: int, max_bytes: int
) -> list[Operands]:
    """Sets of normal random operands."""
    generator = torch.Generator(device).manual_seed(SEED)

    def random() -> torch.Tensor:
        return torch.empty(size, size, device=device, dtype=dtype).normal_(generator=generator)

    def empty() -> torch.Tensor:
        return torch.full((size, size), math.nan, device=device, dtype=dtype)

    return [Operands(random(), random(), empty()) for _ in range(num_sets(size, dtype, cache_bytes, max_bytes))]


class OperandRotation:
    """Cycles through the sets."""

    def __init__(self, sets: list[Operands]) -> None:
        pointers = {tensor.data_ptr() for one in sets for tensor in one}
        assert len(sets) > 1 and len(pointers) == 3 * len(sets), "the operands must not stay in the cache"
        self._sets = sets
        self._turns = 0

    def take_next(self) -> Operands:
        self._turns += 1
        return self.latest

    @property
    def latest(self) -> Operands:
        return self._sets[self._turns % len(self._sets)]


def wrong_elements(checked: Operands) -> int:
    """Number of elements that are not finite, or, in some rows, differ from the product in fp64.

    The tolerance covers rounding of the result to its type, of a few partial sums to the same type (PyTorch notes on
    numerical accuracy, reduced precision reductions; a sum is of the size of the square root of its length), and the
    error of sums in fp32.
    """
    size = len(checked.out)
    rows = torch.linspace(0, size - 1, min(CHECKED_ROWS, size), device=checked.out.device).long()
    exact = checked.a[rows].double() @ checked.b.double()
    resolution = torch.finfo(checked.out.dtype).eps
    tolerance = resolution * (exact.abs() + 4 * math.sqrt(size)) + 4 * torch.finfo(torch.float32).eps * size
    differing = (checked.out[rows].double() - exact).abs() > tolerance
    unsound = ~torch.isfinite(checked.out)
    unsound[rows] |= differing
    return int(unsound.sum())


def _set_bytes(size: int, dtype: torch.dtype) -> int:
    return 3 * size * size * dtype.itemsize

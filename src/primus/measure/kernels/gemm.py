"""Matrix products on a device: operands, rates, and checks of the results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue, MeasuredCall, Mode
from primus.errors import PrimusError
from primus.machine.measurements import Dtype, MeasuredFigure
from primus.measure.kernels import block_scaled
from primus.measure.kernels.block_scaled import FORMATS, cast_rows, make_scales, read_packed
from primus.measure.timing import MeasuredDevice, measure_call

SEED = 1234
CHECKED_ROWS = 8
CHECKED_ELEMENTS = 2**27
"""Elements of an operand that a check converts to fp64, 1 GiB; all columns of products up to 11,585 squared."""
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Types of operands and results, except for fp8 and block formats."""
FNUZ_ARCHITECTURE = "gfx94"
"""Beginning of the architectures whose fp8 is e4m3fnuz (AMD CDNA 3 ISA, section on data formats)."""

TF32_RESOLUTION = 2.0**-10
"""Relative resolution of operands with 10 bits of mantissa (NVIDIA A100 white paper)."""

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Writes the product of the first two matrices into the third."""


class GemmShape(NamedTuple):
    """A product of an m x k and a k x n matrix; a transposed one is stored as its transpose."""

    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False

    @property
    def flop(self) -> int:
        return count_flop(self.m, self.n, self.k)

    def count_bytes(self, in_bytes: float, out_bytes: int) -> int:
        """Bytes of the operands and of the result."""
        return int((self.m * self.k + self.k * self.n) * in_bytes) + self.m * self.n * out_bytes


class Operands(NamedTuple):
    """a x b -> out."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


def multiply_matrices(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The product by the library that training uses: cuBLAS, hipBLASLt or oneDNN."""
    torch.mm(a, b, out=out)


def create_multiply(device: torch.device, shape: GemmShape, dtype: str) -> Multiply:
    """The product of a type, scaled for fp8 and block formats; the scales exist before the measured time."""
    if dtype in FORMATS:
        scales = [make_scales(rows, shape.k, dtype, device) for rows in (shape.m, shape.n)]
    elif dtype == "fp8":
        scales = [torch.ones((), device=device)] * 2
    else:
        return multiply_matrices

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=out.dtype, out=out)

    return multiply


def run(measured: MeasuredDevice, size: int, dtype: Dtype, multiply: Multiply = multiply_matrices) -> MeasuredFigure:
    """TFLOP/s of back-to-back products of square matrices, by `multiply`, with rotating operands."""
    shape = GemmShape(size, size, size)
    set_bytes = count_set_bytes(shape, dtype)
    sets = create_operands(measured.device, shape, dtype, num_sets(set_bytes, measured.cache_bytes, measured.max_bytes))
    rotation, cache_bytes = OperandRotation(sets), measured.cache_bytes
    timing = measure_call(lambda: multiply(*rotation.take_next()), measured.clock, measured.effort)
    wrong = sum(wrong_elements(checked) for checked in (sets[1], rotation.latest))
    rotated_bytes = len(sets) * set_bytes
    return MeasuredFigure(
        test=f"gemm_{dtype}",
        value=shape.flop / timing.median_s / 1e12,
        unit="TFLOP/s",
        convention=f"2MNK / median time, M=N=K={size}, {dtype} in and out, not transposed, normal random, seed {SEED}, "
        f"steady, {len(sets)} rotating sets of operands in {rotated_bytes / 2**20:.0f} MiB, last-level cache "
        f"{cache_bytes / 2**20:.0f} MiB" + ("" if rotated_bytes > cache_bytes else ": the rate includes cache hits"),
        timing=timing,
        wrong=wrong,
        problem=f"{wrong} elements differ from the product in fp64" if wrong else "",
    )


def measure_product(
    context: BenchmarkContext, shape: GemmShape, dtype: str, case: dict[str, CaseValue] | None = None
) -> Iterator[BenchmarkRow]:
    """Rows of one shape.

    Args:
        case: What identifies the product, in addition to its shape.
    """
    whole: dict[str, CaseValue] = {
        **(case or {}),
        "M": shape.m,
        "N": shape.n,
        "K": shape.k,
        "trans": f"{'NT'[shape.trans_a]}{'NT'[shape.trans_b]}",
        "dtype": dtype,
    }
    with select_fp32_precision(dtype):
        yield from context.measure(whole, lambda mode: _make_call(context, shape, dtype, mode))


def _make_call(context: BenchmarkContext, shape: GemmShape, dtype: str, mode: Mode) -> MeasuredCall:
    device = context.device
    if dtype == "tf32" and device.type != "cuda":
        raise PrimusError(f"tf32: not offered by {device}")
    if dtype in FORMATS:
        block_scaled.check_device(device, dtype, shape.k)
    if dtype == "fp8" or dtype in FORMATS:
        # The library wants the second operand transposed in memory (torch._scaled_mm, "mat2 must be col_major").
        shape = shape._replace(trans_a=False, trans_b=True)
    count = context.count_sets(count_set_bytes(shape, dtype), mode)
    sets = create_operands(device, shape, dtype, count)
    rotation = OperandRotation(sets) if count > 1 else None
    multiply = create_multiply(device, shape, dtype)

    def call() -> None:
        multiply(*(rotation.take_next() if rotation else sets[0]))

    def count_wrong() -> int:
        checked = rotation.latest if rotation else sets[0]
        resolution = TF32_RESOLUTION if dtype == "tf32" else None
        return wrong_elements(checked, resolution)

    in_type, out_type = sets[0].a.dtype, sets[0].out.dtype
    return MeasuredCall(
        call=call,
        flop=shape.flop,
        moved_bytes=count_set_bytes(shape, dtype),
        dtype=FORMATS[dtype].peak if dtype in FORMATS else dtype,
        check=count_wrong,
        convention=f"2MNK / median time; operands {_format_type(in_type)}, result {_format_type(out_type)}, normal "
        f"random, seed {SEED}; casts and scales are not timed",
    )


def _format_type(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def count_flop(m: int, n: int, k: int) -> int:
    """Multiplications and additions of an m x k by k x n product."""
    return 2 * m * n * k


def num_sets(set_bytes: int, cache_bytes: int, max_bytes: int) -> int:
    """Number of operand sets so that a set has left the cache when it is used again; at least two."""
    return max(2, min(math.ceil(cache_bytes / set_bytes) + 1, max_bytes // set_bytes))


def count_set_bytes(shape: GemmShape, dtype: str) -> int:
    """Bytes of one set of operands with its result."""
    if dtype in FORMATS:
        return shape.count_bytes(FORMATS[dtype].element_bytes, 2)
    in_bytes = 1 if dtype == "fp8" else DTYPES[dtype].itemsize
    return shape.count_bytes(in_bytes, 2 if dtype == "fp8" else in_bytes)


def create_operands(device: torch.device, shape: GemmShape, dtype: str, count: int) -> list[Operands]:
    """Sets of normal random operands; the result of fp8 and of block formats is bf16."""
    generator = torch.Generator(device).manual_seed(SEED)
    is_cast = dtype == "fp8" or dtype in FORMATS
    out_kind = torch.bfloat16 if is_cast else DTYPES[dtype]
    fp8_type = find_fp8_type(device)

    def random(rows: int, columns: int, is_transposed: bool) -> torch.Tensor:
        stored = (columns, rows) if is_transposed else (rows, columns)
        made = torch.empty(stored, device=device, dtype=torch.float32 if is_cast else out_kind)
        made.normal_(generator=generator)
        if is_cast:  # outside of the measured time
            made = cast_rows(made, dtype) if dtype in FORMATS else made.to(fp8_type)
        return made.t() if is_transposed else made

    def make_set() -> Operands:
        a, b = random(shape.m, shape.k, shape.trans_a), random(shape.k, shape.n, shape.trans_b)
        return Operands(a, b, torch.full((shape.m, shape.n), math.nan, device=device, dtype=out_kind))

    return [make_set() for _ in range(count)]


def find_fp8_type(device: torch.device) -> torch.dtype:
    """The e4m3 type of the device's matrix units."""
    name = torch.cuda.get_device_properties(device).gcnArchName if torch.version.hip and device.type == "cuda" else ""
    return torch.float8_e4m3fnuz if name.startswith(FNUZ_ARCHITECTURE) else torch.float8_e4m3fn


@contextlib.contextmanager
def select_fp32_precision(dtype: str) -> Iterator[None]:
    """Round fp32 operands to tf32 for `tf32`, and never for `fp32`."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


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


def wrong_elements(checked: Operands, resolution: float | None = None) -> int:
    """Number of elements that are not finite, or, in some rows and columns, differ from the product in fp64.

    The tolerance covers rounding of the result to its type, of a few partial sums to the same type (PyTorch notes on
    numerical accuracy, reduced precision reductions; a sum is of the size of the square root of its length), and the
    error of sums in fp32.

    Args:
        resolution: Relative rounding of the operands, if it is coarser than that of the result: tf32.
    """
    (rows, columns), device = checked.out.shape, checked.out.device
    depth = checked.a.shape[1] * (2 if checked.a.dtype == torch.float4_e2m1fn_x2 else 1)
    some_rows = torch.linspace(0, rows - 1, min(CHECKED_ROWS, rows), device=device).long()
    some_columns = torch.linspace(0, columns - 1, max(1, min(CHECKED_ELEMENTS // depth, columns)), device=device).long()
    a, b = _to_fp64(checked.a, 0, some_rows), _to_fp64(checked.b, 1, some_columns)
    exact = a @ b
    coarse = max(torch.finfo(checked.out.dtype).eps, resolution or 0.0)
    tolerance = coarse * (exact.abs() + 4 * math.sqrt(depth)) + 4 * torch.finfo(torch.float32).eps * depth
    differing = (checked.out[some_rows][:, some_columns].double() - exact).abs() > tolerance
    unsound = ~torch.isfinite(checked.out)
    unsound[some_rows[:, None], some_columns] |= differing
    return int(unsound.sum())


def _to_fp64(matrix: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if matrix.dtype.itemsize == 1:  # indexing of fp8 is not implemented on every device; its bytes are
        chosen = matrix.view(torch.uint8).index_select(dim, index)
        if matrix.dtype == torch.float4_e2m1fn_x2:
            return read_packed(chosen, 1 - dim)
        return chosen.view(matrix.dtype).float().double()
    return matrix.index_select(dim, index).double()

"""Benchmarks of matrix products: single shapes, and those of a model's layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue, MeasuredCall, Mode
from primus.errors import PrimusError
from primus.measure import gemm
from primus.measure.gemm import GemmShape, OperandRotation

TF32_RESOLUTION = 2.0**-10
"""Of operands with 10 bits of mantissa (NVIDIA A100 white paper)."""


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
    with gemm.select_fp32_precision(dtype):
        yield from context.measure(whole, lambda mode: _make_call(context, shape, dtype, mode))


def _make_call(context: BenchmarkContext, shape: GemmShape, dtype: str, mode: Mode) -> MeasuredCall:
    device = context.device
    if dtype == "tf32" and device.type != "cuda":
        raise PrimusError(f"tf32: not offered by {device}")
    if dtype == "fp8":
        # The library wants the second operand transposed in memory (torch._scaled_mm, "mat2 must be col_major").
        shape = shape._replace(trans_a=False, trans_b=True)
    count = context.count_sets(gemm.count_set_bytes(shape, dtype), mode)
    sets = gemm.create_operands(device, shape, dtype, count)
    rotation = OperandRotation(sets) if count > 1 else None
    multiply = gemm.create_fp8_multiply(device) if dtype == "fp8" else gemm.multiply_matrices

    def call() -> None:
        multiply(*(rotation.take_next() if rotation else sets[0]))

    def count_wrong() -> int:
        checked = rotation.latest if rotation else sets[0]
        resolution = TF32_RESOLUTION if dtype == "tf32" else None
        return gemm.wrong_elements(checked, resolution)

    in_type, out_type = sets[0].a.dtype, sets[0].out.dtype
    return MeasuredCall(
        call=call,
        flop=shape.flop,
        moved_bytes=shape.count_bytes(in_type.itemsize, out_type.itemsize),
        dtype=dtype,
        check=count_wrong,
        convention=f"2MNK / median time; operands {_format_type(in_type)}, result {_format_type(out_type)}, normal "
        f"random, seed {gemm.SEED}; casts and scales are not timed",
    )


def _format_type(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")

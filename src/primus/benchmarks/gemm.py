"""Matrix products of given shapes: TFLOP/s."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, GemmDtype, Mode, parse_sizes


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark gemm`."""

    m: Annotated[str, Meta(extra={"short": ("-M",), "aliases": ("--M",)})] = "4096"
    """Rows of the result: a number, a list 1024,2048, or a range 1024:16384:x2."""
    n: Annotated[str, Meta(extra={"short": ("-N",), "aliases": ("--N",)})] = "4096"
    """Columns of the result."""
    k: Annotated[str, Meta(extra={"short": ("-K",), "aliases": ("--K",)})] = "4096"
    """Length of the sums."""
    size: str | None = None
    """Square products instead: M, N and K are each of these sizes."""
    trans_a: bool = False
    """The first operand is stored as its transpose."""
    trans_b: bool = False
    """The second operand is stored as its transpose, as weights of linear layers are."""
    mode: tuple[Mode, ...] = ("steady",)
    """Cache state: steady (rotating operands), cold (cache emptied before each call), warm (same operands)."""
    dtype: tuple[GemmDtype, ...] = ("bf16",)
    """Data types; fp8 is e4m3 with bf16 results, mxfp8, mxfp4 and nvfp4 have scales of blocks (CDNA 4, Blackwell)."""


def check_options(options: Options) -> None:
    """Refuse shapes that are not positive."""
    _list_shapes(options)


def _list_shapes(options: Options) -> list[tuple[int, int, int]]:
    if options.size is not None:
        return [(size, size, size) for size in parse_sizes(options.size, "--size")]
    m, n, k = parse_sizes(options.m, "-M"), parse_sizes(options.n, "-N"), parse_sizes(options.k, "-K")
    return list(itertools.product(m, n, k))


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each data type and shape."""
    from primus.measure.kernels.gemm import GemmShape, measure_product

    for dtype, shape in itertools.product(options.dtype, _list_shapes(options)):
        yield from measure_product(context, GemmShape(*shape, options.trans_a, options.trans_b), dtype)

"""Products of all experts of a layer, grouped in one call and one by one: TFLOP/s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, check_positive


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark grouped-gemm`."""

    experts: int = 8
    """Experts on this device."""
    tokens: int = 8192
    """Tokens of all experts together."""
    k: Annotated[int, Meta(extra={"short": ("-K",), "aliases": ("--K",)})] = 4096
    """Width of the input."""
    n: Annotated[int, Meta(extra={"short": ("-N",), "aliases": ("--N",)})] = 14336
    """Width of the output."""
    skew: Annotated[float, Meta(ge=0, le=4)] = 0.0
    """Imbalance: expert i gets tokens in proportion to (i + 1) to the power of minus this; 0 is balanced."""
    mode: tuple[Literal["warm", "cold"], ...] = ("warm",)
    """Cache state: warm (same operands in every call), cold (cache emptied before each call)."""
    dtype: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16",)
    """Data types."""


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive."""
    check_positive(options, ("experts", "tokens", "k", "n"))


def _distribute_tokens(options: Options) -> list[int]:
    """Tokens of each expert."""
    weights = [(number + 1) ** -options.skew for number in range(options.experts)]
    sizes = [int(options.tokens * weight / sum(weights)) for weight in weights]
    sizes[0] += options.tokens - sum(sizes)
    return sizes


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each data type and kind of call."""
    from primus.measure.kernels.model_gemm import measure_grouped_product

    for dtype in options.dtype:
        for is_grouped in (True, False):
            yield from measure_grouped_product(
                context, _distribute_tokens(options), options.k, options.n, dtype, is_grouped=is_grouped
            )

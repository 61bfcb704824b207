"""Matrix products of one layer with experts of a model preset, forward and backward: TFLOP/s by product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, GemmDtype, Mode, check_positive
from primus.config.extended_files import load_model
from primus.errors import UsageError


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark gemm-moe`."""

    model: str = "mixtral_8x7B_v0.1"
    """Model preset with experts."""
    seqlen: int = 4096
    """Tokens of a sequence."""
    mbs: Annotated[int, Meta(extra={"aliases": ("--micro-batch-size", "--micro_batch_size")})] = 1
    """Sequences of a micro batch."""
    mode: tuple[Mode, ...] = ("steady",)
    """Cache state: steady (rotating operands), cold (cache emptied before each call), warm (same operands)."""
    dtype: tuple[GemmDtype, ...] = ("bf16",)
    """Data types."""
    duration: Annotated[float, Meta(gt=0, le=3600)] = 3.0
    """Longest measurement of a product, in seconds."""


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive, and a model without experts."""
    check_positive(options, ("seqlen", "mbs"))
    if not load_model(options.model).num_experts:
        raise UsageError(f"--model {options.model}: has no experts", "use the benchmark gemm-dense")


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each product and direction, and their sums; tokens are evenly distributed over the experts."""
    from primus.measure.kernels.model_gemm import list_head_products, list_moe_products, measure_layer_products

    spec, tokens = load_model(options.model), options.mbs * options.seqlen
    for dtype in options.dtype:
        layers, head = list_moe_products(spec, tokens), list_head_products(spec, tokens)
        yield from measure_layer_products(context, layers, head, dtype)

"""One transformer layer of a model preset, operator by operator, forward and backward: time and TFLOP/s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, check_positive
from primus.config.extended_files import load_model
from primus.errors import UsageError


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark layer`."""

    model: str = "llama3.1_8B"
    """Model preset with dense layers and no latent attention."""
    seqlen: int = 4096
    """Tokens of a sequence."""
    mbs: Annotated[int, Meta(extra={"aliases": ("--micro-batch-size", "--micro_batch_size")})] = 1
    """Sequences of a micro batch."""
    mode: tuple[Literal["warm", "cold"], ...] = ("warm",)
    """Cache state: warm (same operands in every call), cold (cache emptied before each call)."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type."""
    duration: Annotated[float, Meta(gt=0, le=3600)] = 3.0
    """Longest measurement of an operator, in seconds."""


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive, and layers of other kinds."""
    check_positive(options, ("seqlen", "mbs"))
    spec = load_model(options.model)
    if spec.num_experts or spec.multi_latent_attention or spec.hybrid_layer_pattern:
        raise UsageError(f"--model {options.model}: not a dense model", "use gemm-moe, gemm-deepseek and attention")


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each operator and direction, and for the whole layer."""
    from primus.measure.kernels.dense_layer import measure_layer

    yield from measure_layer(context, load_model(options.model), options.mbs, options.seqlen, options.dtype)

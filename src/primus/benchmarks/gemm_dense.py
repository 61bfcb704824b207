"""Matrix products of one dense layer of a model, forward and backward: TFLOP/s by product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, structs

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, GemmDtype, Mode, check_positive
from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark gemm-dense`."""

    model: str | None = None
    """Model preset; options of the shape replace its values."""
    seqlen: int = 2048
    """Tokens of a sequence."""
    hidden_size: int | None = None
    """Width of the model (default without --model: 4096)."""
    intermediate_size: int | None = None
    """Width of the feed-forward (11008)."""
    num_attention_heads: int | None = None
    """Query heads (32)."""
    num_key_value_heads: int | None = None
    """Key/value heads (32)."""
    head_dim: int | None = None
    """Width of a head (128)."""
    vocab_size: int | None = None
    """Size of the vocabulary (32000)."""
    mbs: Annotated[int, Meta(extra={"aliases": ("--micro-batch-size", "--micro_batch_size")})] = 1
    """Sequences of a micro batch."""
    mode: tuple[Mode, ...] = ("steady",)
    """Cache state: steady (rotating operands), cold (cache emptied before each call), warm (same operands)."""
    dtype: tuple[GemmDtype, ...] = ("bf16",)
    """Data types."""
    duration: Annotated[float, Meta(gt=0, le=3600)] = 3.0
    """Longest measurement of a product, in seconds."""


DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32000,
}
"""Shape without a model: Llama 2 7B, the defaults of AMD-AGI/Primus."""
FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
}
"""Model keys of the options."""
BASE_PRESET = "llama2_7B"


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive, and an unknown model."""
    check_positive(options, ("seqlen", "mbs", *FIELDS))
    _make_spec(options)


def _make_spec(options: Options) -> ModelSpec:
    defaults = {} if options.model else DEFAULTS
    given = {name: getattr(options, name) for name in FIELDS}
    values = {FIELDS[name]: given[name] or defaults.get(name) for name in FIELDS}
    return structs.replace(
        load_model(options.model or BASE_PRESET), **{name: value for name, value in values.items() if value}
    )


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each product and direction, and their sums."""
    from primus.measure.kernels.model_gemm import list_dense_products, list_head_products, measure_layer_products

    spec, tokens = _make_spec(options), options.mbs * options.seqlen
    for dtype in options.dtype:
        layers, head = list_dense_products(spec, tokens), list_head_products(spec, tokens)
        yield from measure_layer_products(context, layers, head, dtype)

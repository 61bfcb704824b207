"""Scaled dot-product attention, forward and backward, by each installed implementation: TFLOP/s."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, check_choice, check_positive, parse_sizes
from primus.errors import UsageError

BACKENDS = ("math", "flash", "efficient", "cudnn", "default", "flash_attn", "aiter")


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark attention`."""

    output_file: Annotated[
        tuple[str, ...], Meta(extra={"aliases": ("--output", "-o", "--report-csv-path", "--report_csv_path")})
    ] = ()
    """Result file, format by suffix: .md .txt .csv .tsv .json .jsonl .jsonl.gz .html; `-` prints Markdown."""
    model: Annotated[str | None, Meta(extra={"aliases": ("--models",)})] = None
    """Model preset whose heads are taken; without it --heads, --groups and --head-dim."""
    batch: Annotated[str, Meta(extra={"aliases": ("--mbs-list", "--mbs_list", "--mbs")})] = "1"
    """Sequences of a micro batch: a number, a list, or a range."""
    seqlen: str = "2048"
    """Tokens of a sequence: a number, a list 1024,4096, or a range 1024:16384:x2."""
    heads: Annotated[int, Meta(extra={"aliases": ("--num-attention-heads", "--num_attention_heads")})] = 32
    """Query heads."""
    groups: Annotated[int | None, Meta(extra={"aliases": ("--num-key-value-heads", "--num_key_value_heads")})] = None
    """Key/value heads (default: as many as query heads)."""
    head_dim: int = 128
    """Width of a query and key head."""
    v_head_dim: int | None = None
    """Width of a value head, as in latent attention (default: --head-dim)."""
    causal: bool = True
    """Each token sees the tokens before it."""
    window: int | None = None
    """Maximum tokens that a query sees (default: all)."""
    mode: tuple[Literal["warm", "cold"], ...] = ("warm",)
    """Cache state: warm (same operands in every call), cold (cache emptied before each call)."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type."""
    backend: str = "all"
    """Implementations, separated by commas: math, flash, efficient, cudnn (of PyTorch), default (which PyTorch
    chooses), flash_attn, aiter; or all."""
    forward_only: bool = False
    """Leave the backward pass out."""


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive, and unknown implementations."""
    for name in _list_backends(options):
        check_choice(name, BACKENDS, "--backend")
    check_positive(options, ("heads", "groups", "head_dim", "v_head_dim", "window"))
    parse_sizes(options.batch, "--batch")
    parse_sizes(options.seqlen, "--seqlen")
    if options.heads % (options.groups or options.heads):
        raise UsageError(f"--groups {options.groups}: does not divide --heads {options.heads}")
    if options.model:
        from primus.config.load import load_model

        load_model(options.model)


def _list_backends(options: Options) -> list[str]:
    return list(BACKENDS) if options.backend == "all" else options.backend.split(",")


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each implementation, size and direction; one that fails is a row with its error."""
    from primus.measure.attention import AttentionShape, measure_attention

    heads, groups, head_dim, v_head_dim = options.heads, options.groups, options.head_dim, options.v_head_dim
    window = options.window
    if options.model:
        from primus.config.load import load_model
        from primus.model import head_dim as find_head_dim
        from primus.model import num_query_groups, value_head_dim

        spec = load_model(options.model)
        heads, head_dim, v_head_dim = spec.num_attention_heads, find_head_dim(spec), value_head_dim(spec)
        # Latent attention trains with a key/value head for each query head (DeepSeek-V2, arXiv:2405.04434).
        groups = heads if spec.multi_latent_attention else num_query_groups(spec)
        window = window or spec.window_size
    sizes = itertools.product(parse_sizes(options.batch, "--batch"), parse_sizes(options.seqlen, "--seqlen"))
    for (batch, seqlen), backend in itertools.product(sizes, _list_backends(options)):
        shape = AttentionShape(
            batch, seqlen, heads, groups or heads, head_dim, v_head_dim or head_dim, options.causal, window
        )
        for is_backward in (False,) if options.forward_only else (False, True):
            yield from measure_attention(context, shape, backend, options.dtype, is_backward=is_backward)

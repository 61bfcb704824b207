"""Matrix products of one layer with latent attention and experts, forward and backward: TFLOP/s by product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, structs

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow, GemmDtype, Mode, check_positive
from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec
from primus.errors import UsageError

BASE_PRESET = "deepseek_v2_lite"


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark gemm-deepseek`; the defaults are those of AMD-AGI/Primus."""

    model: str | None = None
    """Model preset, instead of the options of the shape."""
    seqlen: int = 4096
    """Tokens of a sequence."""
    hidden_size: int = 4096
    """Width of the model."""
    intermediate_size: int = 12288
    """Width of the dense feed-forward."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    moe_intermediate_size: int = 1536
    """Width of an expert."""
    num_attention_heads: int = 64
    """Query heads."""
    num_experts_per_tok: int = 6
    """Experts of a token."""
    n_routed_experts: int = 128
    """Experts."""
    n_shared_experts: int = 2
    """Experts of every token."""
    q_lora_rank: int | None = None
    """Width of the latent of queries (default: none)."""
    qk_nope_head_dim: int = 128
    """Width of a query head without position."""
    qk_rope_head_dim: int = 64
    """Width of a query head with position."""
    v_head_dim: int = 128
    """Width of a value head."""
    vocab_size: int = 128256
    """Size of the vocabulary."""
    mbs: Annotated[int, Meta(extra={"aliases": ("--micro-batch-size", "--micro_batch_size")})] = 1
    """Sequences of a micro batch."""
    mode: tuple[Mode, ...] = ("steady",)
    """Cache state: steady (rotating operands), cold (cache emptied before each call), warm (same operands)."""
    dtype: tuple[GemmDtype, ...] = ("bf16",)
    """Data types."""
    duration: Annotated[float, Meta(gt=0, le=3600)] = 3.0
    """Longest measurement of a product, in seconds."""


SIZES = tuple(
    name
    for name in Options.__struct_fields__
    if name not in ("model", "mode", "dtype", *BenchmarkOptions.__struct_fields__)
)


def check_options(options: Options) -> None:
    """Refuse sizes that are not positive or not possible, and an unknown model."""
    check_positive(options, SIZES)
    if options.num_experts_per_tok > options.n_routed_experts:
        chosen, experts = options.num_experts_per_tok, options.n_routed_experts
        raise UsageError(f"--num-experts-per-tok {chosen}: more than --n-routed-experts {experts}")
    _make_spec(options)


def _make_spec(options: Options) -> ModelSpec:
    if options.model:
        return load_model(options.model)
    return structs.replace(
        load_model(BASE_PRESET),
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.intermediate_size,
        kv_lora_rank=options.kv_lora_rank,
        moe_ffn_hidden_size=options.moe_intermediate_size,
        moe_shared_expert_intermediate_size=options.n_shared_experts * options.moe_intermediate_size,
        num_attention_heads=options.num_attention_heads,
        num_query_groups=None,
        moe_router_topk=options.num_experts_per_tok,
        num_experts=options.n_routed_experts,
        q_lora_rank=options.q_lora_rank,
        qk_head_dim=options.qk_nope_head_dim,
        qk_pos_emb_head_dim=options.qk_rope_head_dim,
        v_head_dim=options.v_head_dim,
        vocab_size=options.vocab_size,
    )


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each product and direction, and their sums; tokens are evenly distributed over the experts."""
    from primus.measure.kernels.model_gemm import list_head_products, list_moe_products, measure_layer_products

    spec, tokens = _make_spec(options), options.mbs * options.seqlen
    for dtype in options.dtype:
        layers, head = list_moe_products(spec, tokens), list_head_products(spec, tokens)
        yield from measure_layer_products(context, layers, head, dtype)

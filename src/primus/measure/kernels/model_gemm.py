"""Matrix products of a model's layers: shapes, measurement by product, and sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue, MeasuredCall, Mode
from primus.config.schema import ModelSpec
from primus.measure.kernels.gemm import DTYPES, SEED, GemmShape, measure_product
from primus.models.counts import expert_ffn_size, head_dim, num_query_groups, value_head_dim

DIRECTIONS = ("forward", "dgrad", "wgrad")


class LinearLayer(NamedTuple):
    """A linear layer: `tokens` rows of `inputs` features become `outputs` features."""

    name: str
    tokens: int
    inputs: int
    outputs: int
    repeats: int = 1
    """Number of equal products in a transformer layer, one for each expert."""

    def find_shape(self, direction: str) -> GemmShape:
        """y = x w^T forward; dx = dy w; dw = dy^T x."""
        if direction == "forward":
            return GemmShape(self.tokens, self.outputs, self.inputs, trans_b=True)
        if direction == "dgrad":
            return GemmShape(self.tokens, self.inputs, self.outputs)
        return GemmShape(self.outputs, self.inputs, self.tokens, trans_a=True)


def list_attention_products(spec: ModelSpec, tokens: int) -> list[LinearLayer]:
    """Projections of attention; of latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) down and up."""
    h, n, d, d_v = spec.hidden_size, spec.num_attention_heads, head_dim(spec), value_head_dim(spec)
    if not spec.multi_latent_attention:
        groups = num_query_groups(spec)
        return [LinearLayer("qkv", tokens, h, (n + 2 * groups) * d), LinearLayer("attention_out", tokens, n * d, h)]
    r_kv, d_nope, d_rope = spec.kv_lora_rank or 0, spec.qk_head_dim or 0, spec.qk_pos_emb_head_dim or 0
    query = [LinearLayer("q", tokens, h, n * d)]
    if spec.q_lora_rank:
        query = [
            LinearLayer("q_down", tokens, h, spec.q_lora_rank),
            LinearLayer("q_up", tokens, spec.q_lora_rank, n * d),
        ]
    return [
        *query,
        LinearLayer("kv_down", tokens, h, r_kv + d_rope),
        LinearLayer("kv_up", tokens, r_kv, n * (d_nope + d_v)),
        LinearLayer("attention_out", tokens, n * d_v, h),
    ]


def list_dense_products(spec: ModelSpec, tokens: int) -> list[LinearLayer]:
    """Attention and the gated feed-forward of a dense layer."""
    h, f = spec.hidden_size, spec.ffn_hidden_size
    return [
        *list_attention_products(spec, tokens),
        LinearLayer("gate_up", tokens, h, 2 * f),
        LinearLayer("down", tokens, f, h),
    ]


def list_moe_products(spec: ModelSpec, tokens: int) -> list[LinearLayer]:
    """Attention, router, experts and shared experts of a layer with experts, whose tokens are evenly distributed."""
    h, f, experts = spec.hidden_size, expert_ffn_size(spec), spec.num_experts or 1
    shared = spec.moe_shared_expert_intermediate_size or 0
    found = [*list_attention_products(spec, tokens), LinearLayer("router", tokens, h, experts)]
    found += list_expert_products(tokens, spec.moe_router_topk, experts, h, f)
    if shared:
        found += [LinearLayer("shared_gate_up", tokens, h, 2 * shared), LinearLayer("shared_down", tokens, shared, h)]
    return found


def list_expert_products(tokens: int, topk: int, experts: int, hidden: int, ffn: int) -> list[LinearLayer]:
    """The two products of each expert."""
    own = max(1, tokens * topk // experts)
    return [
        LinearLayer("expert_gate_up", own, hidden, 2 * ffn, experts),
        LinearLayer("expert_down", own, ffn, hidden, experts),
    ]


def list_head_products(spec: ModelSpec, tokens: int) -> list[LinearLayer]:
    """The product with the vocabulary matrix, once a model."""
    return [LinearLayer("output_head", tokens, spec.hidden_size, spec.vocab_size)]


def measure_layer_products(
    context: BenchmarkContext, layers: Sequence[LinearLayer], head: Sequence[LinearLayer], dtype: str
) -> Iterator[BenchmarkRow]:
    """A row for each product and direction, then the sums of one layer, which do not include the head."""
    found: list[tuple[LinearLayer, BenchmarkRow]] = []
    for layer in (*layers, *head):
        for direction in DIRECTIONS:
            case: dict[str, CaseValue] = {"product": layer.name, "direction": direction, "count": layer.repeats}
            for row in measure_product(context, layer.find_shape(direction), dtype, case):
                yield row
                if layer in layers:
                    found.append((layer, row))
    for mode in dict.fromkeys(str(row.case["mode"]) for _, row in found):
        of_mode = [(layer, row) for layer, row in found if row.case["mode"] == mode]
        for direction in (*DIRECTIONS, "all"):
            some = [each for each in of_mode if direction in ("all", each[1].case["direction"])]
            yield _sum_rows(some, direction, dtype, mode, context.rank)


def _sum_rows(
    rows: Sequence[tuple[LinearLayer, BenchmarkRow]], direction: str, dtype: str, mode: str, rank: int
) -> BenchmarkRow:
    """The sum of the products of one layer, each as often as the layer has it."""
    case: dict[str, CaseValue] = {"product": "layer", "direction": direction, "dtype": dtype, "mode": mode}
    failed = [layer.name for layer, row in rows if row.timing is None]
    if failed:
        return BenchmarkRow(case=case, rank=rank, problem=f"no sum: {', '.join(dict.fromkeys(failed))} failed")
    seconds = sum(layer.repeats * row.timing.median_s for layer, row in rows if row.timing)
    flop = sum(layer.repeats * (row.flop or 0.0) for layer, row in rows)
    peak = rows[0][1].peak
    return BenchmarkRow(
        case=case,
        rank=rank,
        value=flop / seconds / 1e12,
        unit="TFLOP/s",
        figures={"layer_us": seconds * 1e6, "layer_gflop": flop / 1e9},
        flop=flop,
        peak=peak,
        share=flop / seconds / 1e12 / peak if peak else None,
        convention="layer: sum of the products of one transformer layer, without attention scores and output head",
    )


def measure_grouped_product(
    context: BenchmarkContext, sizes: Sequence[int], inputs: int, outputs: int, dtype: str, *, is_grouped: bool
) -> Iterator[BenchmarkRow]:
    """The products of all experts, of which each has `sizes` tokens: by one grouped call, or one after another."""
    case: dict[str, CaseValue] = {
        "kind": "grouped" if is_grouped else "one by one",
        "experts": len(sizes),
        "tokens": sum(sizes),
        "largest": max(sizes),
        "K": inputs,
        "N": outputs,
        "dtype": dtype,
    }
    kind, tokens = DTYPES[dtype], sum(sizes)
    moved = (tokens * (inputs + outputs) + len(sizes) * inputs * outputs) * kind.itemsize

    def make_call(mode: Mode) -> MeasuredCall:
        context.count_sets(moved, "warm")  # refuses what does not fit
        generator = torch.Generator(context.device).manual_seed(SEED)
        x = torch.empty(tokens, inputs, device=context.device, dtype=kind).normal_(generator=generator)
        w = torch.empty(len(sizes), outputs, inputs, device=context.device, dtype=kind).normal_(generator=generator)
        ends = torch.tensor(sizes, device=context.device).cumsum(0).to(torch.int32)

        def multiply_one_by_one() -> torch.Tensor:
            return torch.cat([part @ each.t() for part, each in zip(x.split(list(sizes)), w, strict=True)])

        def multiply_grouped() -> torch.Tensor:
            return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)

        call = multiply_grouped if is_grouped else multiply_one_by_one
        out = call()

        def count_wrong() -> int:
            first, last = x[0].double() @ w[0].double().t(), x[-1].double() @ w[-1].double().t()
            near = 4 * torch.finfo(kind).eps * inputs**0.5
            unlike = [(out[0].double() - first).abs() > near + near * first.abs(),
                      (out[-1].double() - last).abs() > near + near * last.abs()]  # fmt: skip
            return int(sum(each.sum() for each in unlike)) + int((~torch.isfinite(out)).sum())

        return MeasuredCall(
            call=call,
            flop=2.0 * tokens * inputs * outputs,
            moved_bytes=moved,
            dtype=dtype,
            check=count_wrong,
            convention="2 tokens K N FLOP / median time; weights stored transposed; normal random",
        )

    yield from context.measure(case, make_call)

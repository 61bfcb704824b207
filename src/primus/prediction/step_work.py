"""The work of one micro batch on each kind of pipeline stage: products, attention, bytes and collectives.

Symbols: h hidden_size, n query heads, g key/value heads, d head width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from primus.config.schema import ModelSpec
from primus.models.counts import count_parameters, expert_ffn_size
from primus.models.layers import (
    LayerKind,
    attention_width,
    head_dim,
    keys_per_query,
    list_layers,
    mixer_size,
    num_query_groups,
    value_head_dim,
)
from primus.prediction.step_layout import StepLayout

MASTER_BYTES = 4
"""Of a gradient in fp32."""
OPTIMIZER_BYTES = 30
"""Read and written by AdamW for each parameter: master weight and two moments (24), gradient (4), weight (2)."""
Scope = Literal["micro batch", "step"]


class Product(Struct, frozen=True):
    """A matrix product of the forward pass of one layer; the backward pass has two of the same FLOPs."""

    name: str
    rows: float
    """Tokens; of one expert where `groups` > 1."""
    columns: float
    inner: float
    groups: int = 1
    """Experts on this device whose products run together."""

    @property
    def flop(self) -> float:
        return 2 * self.rows * self.columns * self.inner * self.groups

    @property
    def weights(self) -> float:
        return self.columns * self.inner * self.groups


class StepCollective(Struct, frozen=True, kw_only=True):
    """What the devices of a group exchange."""

    name: str
    """``tensor``, ``context``, ``expert``, ``weights``, ``gradients`` or ``pipeline``."""
    pattern: Literal["ring", "all-to-all", "send"]
    moved_bytes: float
    """Size of the whole buffer of one call, or of what one device sends."""
    calls: float
    """In a micro batch, or in a step."""
    parts: int = 1
    """Of a call, that are exchanged one after the other: the sharded weights of each layer."""
    scope: Scope
    size: int
    stride: int
    """Distance of the ranks of a group."""


class LayerWork(Struct, frozen=True, kw_only=True):
    """Forward pass of one layer, or of the head, on one device for one micro batch."""

    products: tuple[Product, ...] = ()
    attention_flop: float = 0.0
    element_bytes: float = 0.0
    """Read and written by element-wise kernels that are fused as far as they can be."""
    operators: int = 0
    """Calls to the device, of the forward pass, without those for each expert."""
    experts: int = 0
    """On this device."""


class StageWork(Struct, frozen=True, kw_only=True):
    """One pipeline stage on one device."""

    name: str
    held: tuple[LayerKind, ...]
    """Its layers, prediction layers included."""
    layers: tuple[tuple[LayerWork, int], ...]
    """Each kind of work with its number."""
    parameters: float
    """Of the stage on one device of a replica, before sharding over data-parallel devices."""
    expert_parameters: float
    """Those of them that belong to experts."""
    collectives: tuple[StepCollective, ...]


def divide_layers(spec: ModelSpec, stages: int) -> list[int]:
    """Layers of each stage.

    Where they do not divide, each goes to the stage with the least work: layouts of the engines place them so, since
    the last stage has the head and the prediction layers.
    """
    if spec.num_layers % stages == 0:
        return [spec.num_layers // stages] * stages
    count, vocabulary = count_parameters(spec), spec.vocab_size * spec.hidden_size
    layer = (count.active_parameters - count.embedding - count.output) / spec.num_layers
    loads = [0.0] * stages
    loads[-1] = (1 + spec.mtp_num_layers) * vocabulary / layer + spec.mtp_num_layers
    sizes = [0] * stages
    for _ in range(spec.num_layers):
        stage = min(range(stages), key=lambda each: loads[each])
        sizes[stage] += 1
        loads[stage] += 1
    return sizes


def list_stages(spec: ModelSpec, layout: StepLayout) -> list[StageWork]:
    """The work of each pipeline stage, the first one first."""
    kinds, found, start = list_layers(spec), [], 0
    prediction = [kinds[-1]] * spec.mtp_num_layers
    for index, size in enumerate(divide_layers(spec, layout.pipeline)):
        is_last = index == layout.pipeline - 1
        held = [*kinds[start : start + size], *(prediction if is_last else ())]
        found.append(_build_stage(spec, layout, held, index))
        start += size
    return found


def _build_stage(spec: ModelSpec, layout: StepLayout, held: list[LayerKind], index: int) -> StageWork:
    is_first, is_last = index == 0, index == layout.pipeline - 1
    counted = Counter(held)
    layers = [(_build_layer(spec, layout, kind), number) for kind, number in counted.items()]
    heads = (1 + spec.mtp_num_layers) if is_last else 0
    if heads:
        layers.append((_build_head(spec, layout), heads))
    vocabulary = spec.vocab_size * spec.hidden_size / layout.tensor
    tables = is_first + (is_last and (spec.untie_embeddings_and_output_weights or layout.pipeline > 1))
    experts = sum(_count_expert_parameters(spec, kind) * number for kind, number in counted.items())
    # An expert is whole where the expert group spans the tensor-parallel ranks, as torchtitan and native have it.
    experts /= layout.expert * (layout.tensor if layout.groups.expert_stride == layout.tensor else 1)
    dense = sum(_count_dense_parameters(spec, kind) * number for kind, number in counted.items()) / layout.tensor
    parameters = dense + experts + tables * vocabulary
    return StageWork(
        name=_name_stage(is_first, is_last),
        held=tuple(held),
        layers=tuple(layers),
        parameters=parameters,
        expert_parameters=experts,
        collectives=tuple(_list_collectives(spec, layout, held, parameters, experts)),
    )


def _name_stage(is_first: bool, is_last: bool) -> str:
    if is_first and is_last:
        return "only stage"
    return "first stage" if is_first else "last stage" if is_last else "middle stage"


def _count_expert_parameters(spec: ModelSpec, kind: LayerKind) -> float:
    return 3 * (spec.moe_latent_size or spec.hidden_size) * expert_ffn_size(spec) * (spec.num_experts or 0) * kind.moe


def _count_dense_parameters(spec: ModelSpec, kind: LayerKind) -> float:
    """Mixer, feed-forward, shared experts, router and norms of a layer."""
    h = spec.hidden_size
    total = mixer_size(spec, kind.mixer).parameters + 2 * h
    if kind.feed_forward and (not kind.moe or spec.moe_parallel_dense):
        total += 3 * h * spec.ffn_hidden_size
    if kind.moe:
        total += 3 * h * (spec.moe_shared_expert_intermediate_size or 0) + h * (spec.num_experts or 0)
        total += 2 * h * (spec.moe_latent_size or 0)
    return total


def _build_layer(spec: ModelSpec, layout: StepLayout, kind: LayerKind) -> LayerWork:
    h, tp, tokens = spec.hidden_size, layout.tensor, layout.tokens
    products: list[Product] = []
    attention = 0.0
    elements = 9 * h * tokens / (tp if layout.sequence_parallel else 1)  # two norms, two residual sums
    operators, experts = 8, 0
    if kind.mixer != "none":
        mixer = mixer_size(spec, kind.mixer)
        width = value_head_dim(spec) * spec.num_attention_heads
        out = h * width if width and mixer.matrices > h * width else mixer.matrices / 2
        products += [
            Product("mixer in", tokens, (mixer.matrices - out) / h / tp, h),
            Product("mixer out", tokens, h, out / h / tp),
        ]
        keys = keys_per_query(spec, kind, layout.seq_length, windows=True)
        attention = 2 * tokens * (attention_width(spec, kind) * keys * _narrow_heads(spec) + mixer.state) / tp
        heads = (spec.num_attention_heads + num_query_groups(spec)) * head_dim(spec) / tp
        elements += 2 * heads * tokens * (2 if spec.qk_layernorm or spec.multi_latent_attention else 1)
        if not layout.flash:  # scores are written, scaled, masked, read, dropped out
            elements += 8 * spec.num_attention_heads / tp * layout.seq_length * tokens
        operators += 12 + 8 * spec.multi_latent_attention
    if kind.feed_forward and (not kind.moe or spec.moe_parallel_dense):
        products += _list_ffn_products("feed-forward", tokens, h, spec.ffn_hidden_size / tp)
        elements += 3 * spec.ffn_hidden_size / tp * tokens
        operators += 4
    if kind.moe:
        moe_products, moe_elements = _build_experts(spec, layout)
        products += moe_products
        elements += moe_elements
        operators += 40
        experts = max(1, (spec.num_experts or 1) // layout.expert)
    if not layout.fused:
        operators *= 2
    return LayerWork(
        products=tuple(products),
        attention_flop=attention,
        element_bytes=layout.value_bytes * elements,
        operators=operators,
        experts=experts,
    )


def _narrow_heads(spec: ModelSpec) -> float:
    """Attention's time over that of its FLOPs at a head width of 128: narrower heads have as many exponentials.

    About 1.4 at a width of 64 (FlashAttention-3, arXiv:2407.08608, figure 5).
    """
    return 1 + 0.4 * max(0.0, 128 / max(1, value_head_dim(spec)) - 1)


def _list_ffn_products(name: str, rows: float, h: int, width: float, groups: int = 1) -> list[Product]:
    """Gate and up in one product, and down."""
    return [
        Product(f"{name} in", rows, 2 * width, h, groups),
        Product(f"{name} out", rows, h, width, groups),
    ]


def _build_experts(spec: ModelSpec, layout: StepLayout) -> tuple[list[Product], float]:
    """Products of router, shared and routed experts, and elements that permutations and activations move."""
    h, tokens, tp, k = spec.hidden_size, layout.tokens, layout.tensor, spec.moe_router_topk
    width, experts = expert_ffn_size(spec), spec.num_experts or 1
    inner = spec.moe_latent_size or h
    has_own_tensor = layout.groups.expert_stride == tp  # experts are cut by tensor parallelism too
    groups = max(1, experts // layout.expert)
    # The tokens of a group of devices go to its experts: as many rows arrive as are sent if the load is even.
    routed = tokens * k if has_own_tensor else tokens * k / tp
    expert_width = width / (tp if has_own_tensor else 1)
    products = [
        Product("router", tokens, experts, h),
        *_list_ffn_products("experts", routed / groups, inner, expert_width, groups),
    ]
    # Permuted, sent, unpermuted, weighted and summed. Engines fuse neither biases nor a clamped activation (gpt-oss):
    # the two biases, two clamps, the scaled sigmoid and two products read and write their tensors one after the other.
    is_fused = not (spec.activation_clamp or spec.add_bias_linear)
    elements = routed * (6 * inner + 3 * expert_width if is_fused else 10 * inner + 16 * expert_width)
    shared = spec.moe_shared_expert_intermediate_size
    if shared:
        products += _list_ffn_products("shared experts", tokens, h, shared / tp)
        elements += 3 * shared / tp * tokens
    return products, elements


def _build_head(spec: ModelSpec, layout: StepLayout) -> LayerWork:
    """Logits and loss."""
    logits = layout.tokens * spec.vocab_size / layout.tensor
    product = Product("head", layout.tokens, spec.vocab_size / layout.tensor, spec.hidden_size)
    return LayerWork(products=(product,), element_bytes=8 * logits, operators=12)


def _list_collectives(
    spec: ModelSpec, layout: StepLayout, held: list[LayerKind], parameters: float, experts: float
) -> Iterator[StepCollective]:
    groups, tp, cp = layout.groups, layout.tensor, layout.context
    mixers = sum(kind.mixer != "none" for kind in held)
    feeds = sum(kind.feed_forward for kind in held)
    hidden = layout.tokens * spec.hidden_size * layout.value_bytes
    # A gather and a scatter around each of a layer's two parts, in both passes; without sequence parallelism a
    # reduction of both in one call.
    yield StepCollective(
        name="tensor", pattern="ring", moved_bytes=hidden, calls=4 * (mixers + feeds), scope="micro batch", size=tp,
        stride=1,
    )  # fmt: skip
    keys = layout.tokens * cp * 2 * num_query_groups(spec) * head_dim(spec) * layout.value_bytes / tp
    yield StepCollective(
        name="context", pattern="ring", moved_bytes=keys, calls=3 * mixers, scope="micro batch", size=cp, stride=tp
    )
    moe = sum(kind.moe for kind in held)
    sent = layout.tokens * (spec.moe_latent_size or spec.hidden_size) * layout.value_bytes * spec.moe_router_topk / tp
    yield StepCollective(
        name="expert", pattern="all-to-all", moved_bytes=sent, calls=4 * moe, scope="micro batch",
        size=layout.expert if moe else 1, stride=groups.expert_stride,
    )  # fmt: skip
    passed = hidden / (tp if layout.sequence_parallel else 1)
    yield StepCollective(
        name="pipeline", pattern="send", moved_bytes=passed, calls=2 * layout.virtual, scope="micro batch",
        size=layout.pipeline, stride=tp * cp * layout.data,
    )  # fmt: skip
    layers = max(1, len(held))
    yield from _list_weight_collectives(layout, parameters - experts, layout.data * cp, tp, layers)
    stride = groups.expert_stride * layout.expert
    yield from _list_weight_collectives(layout, experts, groups.num_expert_copies, stride, layers)


def _list_weight_collectives(
    layout: StepLayout, held: float, size: int, stride: int, layers: int
) -> Iterator[StepCollective]:
    """Weights are gathered for both passes and gradients scattered, for each micro batch (FSDP) or once a step."""
    if not held:
        return
    full = layout.sharding == "full"
    scope: Scope = "micro batch" if full else "step"
    # Gradients are reduced in fp32 by torchtitan and Megatron alike; without sharding in one reduction, two passes.
    gathers = 2 if full else 1 if layout.sharding == "optimizer" else 0
    width = 1 if layout.precision == "fp8" and full else layout.value_bytes
    yield StepCollective(
        name="weights",
        pattern="ring",
        moved_bytes=held * width,
        calls=gathers,
        parts=layers,
        scope=scope,
        size=size,
        stride=stride,
    )
    reductions = 1 if gathers else 2
    yield StepCollective(
        name="gradients", pattern="ring", moved_bytes=held * MASTER_BYTES, calls=reductions, parts=layers,
        scope="step" if layout.accumulates_whole else scope,
        size=size, stride=stride,
    )  # fmt: skip


def count_recomputed_share(layout: StepLayout) -> float:
    """Share of the products of a layer's forward pass that the backward pass computes again."""
    return {"none": 0.0, "scores": 0.0, "alternate": 3 / 7, "full": 1.0}[layout.recompute]

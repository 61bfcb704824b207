"""The time of a step: the work of each stage at the rates of a device, with what collectives add."""

from __future__ import annotations

from msgspec import Struct

from primus.config.schema import ModelSpec
from primus.models.counts import flops_per_token
from primus.prediction.device_rates import DeviceRates
from primus.prediction.step_layout import StepLayout
from primus.prediction.step_work import (
    MASTER_BYTES,
    OPTIMIZER_BYTES,
    LayerWork,
    Product,
    Scope,
    StageWork,
    StepCollective,
    count_recomputed_share,
    list_stages,
)


class FittedConstants(Struct, frozen=True, kw_only=True):
    """Constants that are the same for all devices, models and layouts.

    All but `operator_us`, `expert_calls` and `context_exposed`, which the rows do not decide and which are assumed,
    were fitted to the rows of `published_steps.yaml` marked `fit`; `benchmarks/prediction_errors.py --refit` finds
    them again.
    """

    product_share: float = 0.845
    """Of the best product's rate, that products of a model reach in bf16."""
    low_product_share: float = 0.894
    """The same in fp8 and fp4."""
    attention_share: float = 0.416
    """Of the best product's rate in bf16, that attention reaches."""
    memory_share: float = 0.703
    """Of the peak memory bandwidth, that element-wise kernels reach."""
    half_rows: float = 1000.0
    """Rows of an expert at which a grouped product reaches half of the rate of a large one."""
    operator_us: float = 8.0
    """Host time of one call to the device: 5 to 8 us."""
    expert_calls: float = 12.0
    """Calls to the device for each expert on it in the forward pass: products, quantized inputs, splits."""
    tensor_exposed: float = 0.2
    """Share of tensor-parallel collectives in pieces that products do not hide; the plain ones are not hidden."""
    context_exposed: float = 0.5
    expert_exposed: float = 0.662
    weights_exposed: float = 0.4
    """Share of gathers of weights and scatters of gradients that computation does not hide."""


FITTED = FittedConstants()
QUANTIZED_BYTES = 6
"""Read and written to quantize one value of a product's input in fp8: its maximum, the value, and its two layouts."""
CALL_US, LINK_HOP_US, NETWORK_HOP_US = 8.4, 3.4, 14.0
"""Of one collective, and of each step of its ring over a link and over the network (NCCL `src/graph/tuning.cc`, baseLat
and hwLat of Ring with Simple)."""
BACKWARD_ATTENTION = 2.5
"""Backward pass of attention over its forward pass (FlashAttention-2, arXiv:2307.08691, section 3.1)."""
UNFUSED = 2.2
"""Bytes of element-wise operators that are not fused, over fused ones: each reads and writes its tensors."""


class StepTime(Struct, frozen=True, kw_only=True):
    """The predicted time of one step, by term, in seconds."""

    terms: dict[str, float]
    """Seconds of the slowest stage, of all micro batches: products, attention, element-wise, recompute, host, the
    exposed part of each kind of collective, bubble, optimizer."""
    tokens: int
    """Of one step, all devices."""
    devices: int
    tflops: float
    """Model FLOPs of one device in a second, causal convention."""
    mfu: float | None
    """Over the dense peak of the precision of products; None where that is not known."""
    peak_dtype: str
    stage: str
    """The slowest stage."""
    collectives: tuple[PredictedCollective, ...]

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens / self.seconds / self.devices

    @property
    def communication_share(self) -> float:
        """Share of the step in which devices wait for collectives."""
        return sum(value for name, value in self.terms.items() if name in COMMUNICATION) / self.seconds

    @property
    def hidden_share(self) -> float:
        """Collectives beside which devices compute, as a share of the step."""
        return sum(each.seconds - each.exposed_seconds for each in self.collectives) / self.seconds


class PredictedCollective(Struct, frozen=True, kw_only=True):
    """One kind of collective of the slowest stage."""

    name: str
    size: int
    members_of_domain: int
    """Of a group that are linked with each other; the others are reached by the network."""
    bytes_of_step: float
    """That one device sends."""
    scope: Scope
    """How often: for each micro batch, or once."""
    seconds: float
    """In a step, hidden or not."""
    exposed_seconds: float

    @property
    def crosses(self) -> bool:
        return self.members_of_domain < self.size


COMMUNICATION = ("tensor", "context", "expert", "weights and gradients", "pipeline")


def predict_step(spec: ModelSpec, layout: StepLayout, rates: DeviceRates, fitted: FittedConstants = FITTED) -> StepTime:
    """The time of a step; the slowest stage decides."""
    stages = list_stages(spec, layout)
    distinct = {(stage.layers, stage.name): stage for stage in stages}
    found = [(time_stage(stage, layout, rates, fitted), stage) for stage in distinct.values()]
    (terms, collectives), slowest = max(found, key=lambda pair: sum(pair[0][0].values()))
    tokens = layout.global_batch * layout.seq_length
    seconds = sum(terms.values())
    tflops = flops_per_token(spec, layout.seq_length) * tokens / seconds / layout.devices / 1e12
    peak = rates.peak_tflops.get(layout.precision)
    return StepTime(
        terms=terms,
        tokens=tokens,
        devices=layout.devices,
        tflops=tflops,
        mfu=tflops / peak if peak else None,
        peak_dtype=layout.precision,
        stage=slowest.name,
        collectives=tuple(collectives),
    )


def time_stage(
    stage: StageWork, layout: StepLayout, rates: DeviceRates, fitted: FittedConstants
) -> tuple[dict[str, float], list[PredictedCollective]]:
    """Seconds of each term in a step of one stage, and its collectives."""
    terms = dict.fromkeys(("products", "attention", "element-wise", "recompute"), 0.0)
    operators = 0.0
    for work, number in stage.layers:
        for name, seconds in _time_layer(work, layout, rates, fitted).items():
            terms[name] += seconds * number
        calls = work.operators + work.experts * fitted.expert_calls
        operators += number * calls * (3 + (layout.recompute != "none"))
    is_sharded = layout.sharding == "full" and not layout.accumulates_whole
    accumulated = 0.0 if is_sharded else 2 * MASTER_BYTES * stage.parameters
    terms["element-wise"] += accumulated / (rates.memory_gb_per_s * fitted.memory_share * 1e9)
    compute = sum(terms.values())
    timed = [_time_collective(each, layout, rates) for each in stage.collectives if each.size > 1 and each.calls]
    exposed = dict.fromkeys(COMMUNICATION, 0.0)
    exposed["tensor"] = _sum(timed, "tensor") * (fitted.tensor_exposed if layout.tensor_overlap else 1.0)
    exposed["context"] = _sum(timed, "context") * fitted.context_exposed
    exposed["expert"] = _sum(timed, "expert") * fitted.expert_exposed
    exposed["pipeline"] = _sum(timed, "pipeline") if layout.virtual == 1 else 0.0
    weights = [(each, seconds) for each, seconds in timed if each.name in ("weights", "gradients")]
    of_batch = sum(seconds for each, seconds in weights if each.scope == "micro batch")
    of_step = sum(seconds for each, seconds in weights if each.scope == "step")
    exposed["weights and gradients"] = max(fitted.weights_exposed * of_batch, of_batch - compute)
    host = operators * fitted.operator_us * 1e-6
    busy = compute + sum(exposed.values())
    batches = layout.micro_batches
    idle = (layout.pipeline - 1) / layout.virtual
    result = {name: seconds * batches for name, seconds in terms.items()}
    result["host"] = max(0.0, host - busy) * batches
    result |= {name: seconds * batches for name, seconds in exposed.items()}
    result["bubble"] = idle * max(busy, host)
    result["weights and gradients"] += max(fitted.weights_exposed * of_step, of_step - compute)
    result["optimizer"] = _time_optimizer(stage, layout, rates, fitted)
    ratios = {name: exposed[name] / total for name in exposed if (total := _sum(timed, name))}
    total = of_batch * batches + of_step
    shares = ratios | dict.fromkeys(("weights", "gradients"), result["weights and gradients"] / total if total else 0.0)
    listed = [
        PredictedCollective(
            name=each.name,
            size=each.size,
            members_of_domain=_count_members(each, rates),
            bytes_of_step=_count_sent(each) * (repeats := batches if each.scope == "micro batch" else 1),
            scope=each.scope,
            seconds=seconds * repeats,
            exposed_seconds=seconds * repeats * shares.get(each.name, 0.0),
        )
        for each, seconds in timed
    ]
    return result, listed


def _sum(timed: list[tuple[StepCollective, float]], name: str) -> float:
    return sum(seconds for each, seconds in timed if each.name == name)


def _time_layer(work: LayerWork, layout: StepLayout, rates: DeviceRates, fitted: FittedConstants) -> dict[str, float]:
    """Seconds of one layer, forward and backward, for one micro batch."""
    memory = rates.memory_gb_per_s * fitted.memory_share * 1e9
    forward = sum(_time_product(each, layout, rates, fitted) for each in work.products)
    attention = work.attention_flop / (rates.tflops["bf16"] * fitted.attention_share * 1e12)
    element_bytes = work.element_bytes * (1 if layout.fused else UNFUSED)
    elements = 3 * element_bytes
    if layout.precision in ("fp8", "fp4"):
        elements += QUANTIZED_BYTES * sum(
            each.rows * (each.inner + each.columns) * each.groups for each in work.products
        )
    again = count_recomputed_share(layout) * forward
    if layout.recompute in ("alternate", "full"):
        again += element_bytes / memory
    if layout.recompute in ("scores", "full"):
        again += attention
    return {
        "products": 3 * forward,
        "attention": (1 + BACKWARD_ATTENTION) * attention,
        "element-wise": elements / memory,
        "recompute": again,
    }


def _time_product(product: Product, layout: StepLayout, rates: DeviceRates, fitted: FittedConstants) -> float:
    """Forward pass of one product: its FLOPs at the rate of its precision, or its weights and rows from memory."""
    is_low = layout.precision in ("fp8", "fp4") and product.name not in ("head", "router")
    dtype = layout.precision if is_low or layout.precision == "fp32" else "bf16"
    rate = rates.tflops.get(dtype, rates.tflops["bf16"]) * 1e12
    rate *= fitted.low_product_share if is_low else fitted.product_share
    if product.groups > 1:
        rate *= product.rows / (product.rows + fitted.half_rows)
    moved = layout.value_bytes * (product.weights + product.rows * product.groups * (product.inner + product.columns))
    return max(product.flop / rate, moved / (rates.memory_gb_per_s * fitted.memory_share * 1e9))


def _count_members(each: StepCollective, rates: DeviceRates) -> int:
    """Ranks of a group that lie in one domain, those that follow each other at its stride."""
    return min(each.size, max(1, rates.domain // each.stride))


def _count_sent(each: StepCollective) -> float:
    share = 1.0 if each.pattern == "send" else (each.size - 1) / each.size
    return each.moved_bytes * each.calls * share


def _time_collective(each: StepCollective, layout: StepLayout, rates: DeviceRates) -> tuple[StepCollective, float]:
    """Seconds of all calls of one kind in a micro batch, or in a step."""
    inside = _count_members(each, rates)
    link, network = rates.link_gb_per_s * 1e9, rates.network_gb_per_s * 1e9
    latency = each.calls * each.parts * CALL_US * 1e-6
    if each.pattern == "send":
        return each, each.moved_bytes * each.calls / (link if inside > 1 else network) + latency
    if each.pattern == "ring":
        # Each of the members of a node has a ring with a NIC of its own; links carry all of them.
        rate = link if inside == each.size else min(link, network * inside)
        nodes = -(-each.size // inside)
        hops = (each.size - nodes) * LINK_HOP_US + (nodes - 1) * NETWORK_HOP_US
        return each, _count_sent(each) / rate + latency + each.calls * each.parts * hops * 1e-6
    sent = each.moved_bytes * each.calls
    within = sent * (inside - 1) / each.size / link
    across = sent * (each.size - inside) / each.size / network
    return each, max(within, across) + latency


def _time_optimizer(stage: StageWork, layout: StepLayout, rates: DeviceRates, fitted: FittedConstants) -> float:
    shards = 1 if layout.sharding == "none" else layout.data * layout.context
    copies = 1 if layout.sharding == "none" else max(1, layout.groups.num_expert_copies)
    dense = stage.parameters - stage.expert_parameters
    held = dense / shards + stage.expert_parameters / copies
    return held * OPTIMIZER_BYTES / (rates.memory_gb_per_s * fitted.memory_share * 1e9)

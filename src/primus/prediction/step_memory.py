"""The memory of one device in a step, by component, for each kind of pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from primus.config.schema import ModelSpec
from primus.models.counts import expert_ffn_size
from primus.models.layers import LayerKind, head_dim, mixer_size, num_query_groups, value_head_dim
from primus.prediction.step_layout import StepLayout
from primus.prediction.step_work import StageWork, list_stages

GIB = 2**30
STATE_BYTES = {
    # weight, gradient and optimizer state of one parameter of AdamW, in bytes; the state is sharded over the
    # data-parallel devices except with "none", with "full" all three are.
    "none": (2, 4, 12),
    "optimizer": (2, 4, 12),
    "full": (4, 4, 8),
}
"""Megatron-LM: weights in bfloat16, gradients in fp32, a master weight and two moments in fp32
(`theoretical_memory_usage.py`: 18, or 6 + 12 / data parallel size). FSDP2: weights, gradients, two moments in fp32."""
RESERVED_BYTES = 2 * GIB
"""Of a device for its context, kernels and communication buffers (assumed; NCCL and RCCL take 1 to 2 GiB)."""
FRAGMENTATION = 0.05
"""Of the activations, that the allocator holds without use (assumed)."""


class StepMemory(Struct, frozen=True, kw_only=True):
    """Peak memory of one device of a stage, in bytes."""

    stage: str
    weights: float
    gathered: float
    """Weights of two units that sharding gathers at a time."""
    gradients: float
    optimizer: float
    activations: float
    """Kept for the backward pass, of all micro batches in flight."""
    working: float
    """Of the layer whose backward pass runs: what is recomputed, and whole gradients; or of the loss."""
    allowance: float
    """Reserved by the device and its libraries, and fragmentation."""

    @property
    def total(self) -> float:
        parts = self.weights + self.gathered + self.gradients + self.optimizer
        return parts + self.activations + self.working + self.allowance

    def list_components(self) -> Mapping[str, float]:
        """Bytes by component."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "stage"}


def predict_memory(spec: ModelSpec, layout: StepLayout) -> list[StepMemory]:
    """The memory of each stage, the first one first."""
    return [_predict_stage(spec, layout, stage, index) for index, stage in enumerate(list_stages(spec, layout))]


def find_largest(memories: list[StepMemory]) -> StepMemory:
    """The stage that needs most."""
    return max(memories, key=lambda each: each.total)


def _predict_stage(spec: ModelSpec, layout: StepLayout, stage: StageWork, index: int) -> StepMemory:
    held = stage.held
    weight, gradient, state = STATE_BYTES[layout.sharding]
    dense = stage.parameters - stage.expert_parameters
    sharded = dense / (layout.data * layout.context) + stage.expert_parameters / max(1, layout.groups.num_expert_copies)
    kept = sharded if layout.sharding == "full" else stage.parameters
    of_layer = max((count_activation_bytes(spec, layout, kind) for kind in held), default=0.0)
    in_flight = _count_micro_batches_in_flight(layout, index)
    # The formulas count values of 2 bytes.
    tokens = layout.tokens * layout.value_bytes / 2 * layout.kept_activations
    activations = in_flight * sum(tokens * _count_kept_bytes(spec, layout, kind) for kind in held)
    is_last = index == layout.pipeline - 1
    again = tokens * of_layer if layout.recompute in ("alternate", "full") else 0.0
    has_vocabulary = index == 0 or is_last
    table = spec.vocab_size * spec.hidden_size / layout.tensor if has_vocabulary else 0.0
    unit = max(table, stage.parameters / max(1, len(held)))
    is_gathered = layout.sharding == "full" and layout.data * layout.context > 1
    gradients_of_unit = layout.value_bytes * unit if is_gathered else 0.0
    working = max(_count_logit_bytes(spec, layout) if is_last else 0.0, again + gradients_of_unit)
    return StepMemory(
        stage=stage.name,
        weights=kept * weight,
        gathered=2 * layout.value_bytes * unit if is_gathered else 0.0,
        gradients=(stage.parameters if layout.accumulates_whole else kept) * gradient,
        optimizer=(stage.parameters if layout.sharding == "none" else sharded) * state,
        activations=activations,
        working=working,
        allowance=RESERVED_BYTES + FRAGMENTATION * (activations + working),
    )


def _count_logit_bytes(spec: ModelSpec, layout: StepLayout) -> float:
    """Of the loss: logits and their gradient, and of the head its gradient where it is added up."""
    columns = spec.vocab_size / layout.tensor
    logits = layout.tokens * columns * layout.logit_bytes
    most = layout.most_logits * layout.logit_bytes / layout.value_bytes
    return logits if logits <= most else most + columns * spec.hidden_size * (4 + layout.value_bytes)


def _count_micro_batches_in_flight(layout: StepLayout, index: int) -> float:
    """Micro batches whose activations a stage holds at the peak of 1F1B, in units of its whole layers."""
    stages, groups, total = layout.pipeline, layout.virtual, layout.micro_batches
    if groups == 1:
        return min(total, stages - index)
    chunks = min(total * groups, 2 * (stages - 1 - index) + (groups - 1) * stages + 1)
    return chunks / groups


def _count_kept_bytes(spec: ModelSpec, layout: StepLayout, kind: LayerKind) -> float:
    """Activations of a layer for one token that stay until its backward pass."""
    h, tp = spec.hidden_size, layout.tensor
    shared = tp if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return 2 * h / shared
    if layout.recompute == "alternate":
        # Outputs of the first, third, fifth product and so on, of attention, and the input of the layer.
        whole = count_activation_bytes(spec, layout, kind)
        mixing = 2 * (spec.num_attention_heads * (head_dim(spec) + value_head_dim(spec))) / tp
        groups = 2 * num_query_groups(spec) * value_head_dim(spec) / tp
        return min(whole, 4 * h / shared + mixing + groups + _count_ffn_width(spec, layout, kind) * 2)
    return count_activation_bytes(spec, layout, kind)


def _count_ffn_width(spec: ModelSpec, layout: StepLayout, kind: LayerKind) -> float:
    """Inner width that one token passes through on one device, experts included."""
    width = 0.0
    if kind.feed_forward and (not kind.moe or spec.moe_parallel_dense):
        width += spec.ffn_hidden_size
    if kind.moe:
        kept = 1.0 if layout.keeps_expert_outputs else 2 / 3
        width += spec.moe_router_topk * expert_ffn_size(spec) * kept + (spec.moe_shared_expert_intermediate_size or 0)
    return width / layout.tensor


def count_activation_bytes(spec: ModelSpec, layout: StepLayout, kind: LayerKind) -> float:
    """All activations of a layer for one token on one device, in bytes, without recomputation.

    Inputs of the norms and of what follows them, 8 h (shared by tensor parallelism under sequence parallelism);
    queries, keys, values and the output, 2 n (d + d_v) + 4 g d; gate, up and their product, 6 f. With dropout masks and
    without flash attention 2 h and 5 n s more: s b h (34 + 5 n s / h) in all for GPT-3 (arXiv:2205.05198, section 4).
    """
    h, tp = spec.hidden_size, layout.tensor
    parts = (kind.mixer != "none") + kind.feed_forward
    whole = 4 * h * parts + (0 if layout.flash else h * parts)
    cut = 6 * _count_ffn_width(spec, layout, kind) * tp
    if kind.mixer in ("attention", "window", "compressed", "sparse"):
        n, d = spec.num_attention_heads, head_dim(spec)
        cut += 2 * n * (d + value_head_dim(spec)) + 4 * num_query_groups(spec) * d
        if not layout.flash and layout.recompute == "none":
            cut += 5 * n * layout.seq_length
    elif kind.mixer != "none":
        cut += 4 * mixer_size(spec, kind.mixer).matrices / h  # inputs and outputs of its projections
    if kind.moe:
        rows = 4 if layout.keeps_expert_outputs else 2  # permuted rows, and their outputs
        whole += rows * spec.moe_router_topk * (spec.moe_latent_size or h)
    return whole / (tp if layout.sequence_parallel else 1) + cut / tp

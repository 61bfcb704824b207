"""The decoder-only transformer that `native` trains.

Shape suffixes: B batch, S sequence, D model width, H query heads, K key/value heads, C channels of one head,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor, nn

from primus.checkpoint.initial_values import InitialMatrix, draw_parts, split_initial_value
from primus.config.schema import ModelSpec, TrainingConfig
from primus.data.training.masks import DocumentHandling
from primus.frameworks.native.engine import documents, moe, ops, rope
from primus.frameworks.native.engine.cache import KeyValueCache, LayerCache
from primus.frameworks.native.engine.collectives import (
    enter_tensor_region,
    leave_tensor_region,
    take_context,
)
from primus.frameworks.native.engine.layers import Linear, RowLinear, attend, build_norm
from primus.frameworks.native.engine.layout import ALONE, Axis, Layout
from primus.frameworks.native.engine.loss import HeadPart, LossSettings, add_loss, count_targets, cross_entropy
from primus.frameworks.native.engine.mla import LatentAttention
from primus.frameworks.native.engine.moe import MixtureOfExperts
from primus.frameworks.native.engine.placement import Division, PlacedWeight, find_begin, find_division, share
from primus.frameworks.native.engine.prediction import PredictionLayer, shift_tokens
from primus.frameworks.native.engine.recompute import ActivationMemory, build_activation_memory, recompute_modules
from primus.frameworks.native.support import check_model
from primus.frameworks.native.training_settings import TrainingSettings
from primus.models.counts import LayerKind, head_dim, list_layers, num_query_groups

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader
    from primus.session.settings.adapter_settings import AdapterSettings

DEFAULTS = TrainingSettings()
ADAPTER = ".adapter."
"""In the name of each weight of an adapter."""


def build_model(
    spec: ModelSpec,
    device: torch.device | str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    layout: Layout = ALONE,
    stage: StageLayers | None = None,
) -> Transformer:
    """A model whose weights depend on `spec` and `seed` only, not on the device or the number of processes.

    On device `meta` nothing is allocated: shard the model with `step.prepare_model`, then call `initialize_weights`.

    Raises:
        UsageError: `spec` has something that native does not support.
    """
    with torch.device("meta"):
        model = Transformer(spec, layout, stage).to(dtype)
        if spec.mtp_num_layers:
            model.prediction_loss = model.prediction_loss.double()
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialize_weights(model, seed)
    return model


def initialize_weights(model: Transformer, seed: int) -> None:
    """Fill every weight in place, whole or in part, from `seed` and the weight's name (`draw_initial_value`).

    The processes of a pipeline stage draw different matrices, in turns, and send them to each other: one that drew all
    of them would need a minute for 6 billion values.
    """
    fill_frequencies(model)
    named = _list_own_weights(model)
    matrices = [(weight, each) for name, weight in named for each in split_initial_value(name, weight.shape)]
    for weight, matrix in matrices:
        if matrix.is_constant:
            weight.fill(next(draw_parts(matrix, model.spec, seed)))
    drawn = sorted((each for each in matrices if not each[1].is_constant), key=lambda each: -math.prod(each[1].shape))
    stage = model.layout.stage
    for first in range(0, len(drawn), stage.size):
        _draw_together(drawn[first : first + stage.size], stage, model.spec, seed)


def _draw_together(turn: Sequence[tuple[PlacedWeight, InitialMatrix]], stage: Axis, spec: ModelSpec, seed: int) -> None:
    """Draw a matrix in each process, and send its rows to all; memory is needed for two parts of a matrix."""
    own = draw_parts(turn[stage.rank][1], spec, seed) if stage.rank < len(turn) else iter(())
    for number in range(max(len(matrix.split_rows()) for _, matrix in turn)):
        drawn = next(own, None)
        for owner, (weight, matrix) in enumerate(turn):
            if number >= len(matrix.split_rows()):
                continue
            begin, count = matrix.split_rows()[number]
            if owner == stage.rank and drawn is not None:
                rows = drawn.to(weight.local)
            else:
                rows = weight.local.new_empty(count, *matrix.shape[1:])
            if stage.size > 1:
                dist.broadcast(rows, group=stage.group, group_src=owner)
            if matrix.expert is None:
                weight.fill(rows, begin)
            else:
                weight.fill(rows.unsqueeze(0), matrix.expert)


def fill_frequencies(model: Transformer) -> None:
    """Fill the rotary frequencies, which a model that was on the meta device lacks, and no checkpoint holds."""
    channels = rope.count_rotary_channels(model.spec)
    model.frequencies.copy_(rope.compute_frequencies(model.spec, channels))
    model.window_frequencies.copy_(rope.compute_window_frequencies(model.spec, channels))
    if model.spec.mtp_num_layers:
        model.prediction_loss.zero_()
    moe.fill_buffers(model)


def load_weights(model: Transformer, weights: WeightReader) -> None:
    """Fill every weight in place, whole or in part, from weights in hub names.

    Raises:
        PrimusError: A weight is missing, or has another shape.
    """
    from primus.checkpoint.renaming import EngineNames  # only with `load:`

    named = EngineNames(weights, model.spec, "native")
    fill_frequencies(model)
    for name, weight in _list_own_weights(model):
        weight.fill(named.read(name))


def _list_own_weights(model: Transformer) -> list[tuple[str, PlacedWeight]]:
    """The weights of the model itself, without those of adapters, and the biases that balance experts."""
    placed = model.place_weights() | model.place_balance_biases()
    return [(name, weight) for name, weight in placed.items() if ADAPTER not in name]


class StageLayers(NamedTuple):
    """The layers of a pipeline stage, or all of a model."""

    groups: tuple[range, ...]
    """Consecutive layers each, which a micro batch passes before it goes on to the next stage."""
    is_first: bool = True
    """Whether the first group embeds token ids."""
    is_last: bool = True
    """Whether the last norm, the output head and the layers of multi-token prediction follow the last group."""


class Transformer(nn.Module):
    """Token ids to hidden states, or with targets to their loss.

    Args:
        spec: The model.
        layout: The processes that share it.
        stage: The layers that this process has; all when None.
    """

    frequencies: Tensor
    """Rotary frequencies [C / 2], in float32 or wider; not part of the state."""
    window_frequencies: Tensor
    """Those of the layers with a window."""
    prediction_loss: Tensor

    def __init__(self, spec: ModelSpec, layout: Layout = ALONE, stage: StageLayers | None = None) -> None:
        check_model(spec)
        super().__init__()
        self.spec, self.layout = spec, layout
        self.stage = stage or StageLayers((range(spec.num_layers),))
        self.compute_dtype: torch.dtype | None = None
        """Of the passes; that of the parameters when None. Parameters, gradients and optimizer keep theirs."""
        self.activations: ActivationMemory | None = None
        """What is kept of each layer until its backward pass; everything, on the device, when None."""
        self.loss_settings = LossSettings(softcap=spec.final_logit_softcapping)
        self.documents: DocumentHandling | None = None
        self._divisions: dict[str, Division] = {}
        self.adapters: AdapterSettings | None = None
        self.objective: Callable[..., Tensor] | None = None
        """(hidden states, output head, targets, scale, examples) -> loss, in place of the cross-entropy."""
        self.cache: KeyValueCache | None = None
        """Of the tokens before those of a pass, while tokens are generated."""
        tied = not spec.untie_embeddings_and_output_weights
        is_first, is_last = self.stage.is_first, self.stage.is_last
        self.embedding = Embedding(spec, layout) if is_first or (is_last and self._last_stage_embeds) else None
        kinds = list(list_layers(spec))
        # By number, so that the weights of a stage have the names that they have in the whole.
        self.layers = nn.ModuleDict(
            {str(n): TransformerLayer(spec, kinds[n], layout) for group in self.stage.groups for n in group}
        )
        self.norm = build_norm(spec) if is_last else None
        vocabulary = share(spec.vocab_size, layout.tensor)
        self.output = Linear(spec.hidden_size, vocabulary, bias=False) if is_last and not tied else None
        like_last = structs.replace(kinds[-1], window=None)
        self.predictions = nn.ModuleList(
            PredictionLayer(spec, TransformerLayer(spec, like_last, layout))
            for _ in range(spec.mtp_num_layers if is_last else 0)
        )
        self.prediction_loss_factor = DEFAULTS.mtp_loss_scaling_factor
        # Of the passes of a step; a buffer, which a compiled pass can add to.
        if spec.mtp_num_layers:
            self.register_buffer("prediction_loss", torch.zeros(()), persistent=False)
        for name in ("frequencies", "window_frequencies"):
            self.register_buffer(name, torch.empty(rope.count_rotary_channels(spec) // 2), persistent=False)

    def configure(self, training: TrainingConfig, settings: TrainingSettings = DEFAULTS) -> None:
        """Compute as an experiment asks for."""
        self.compute_dtype = torch.bfloat16 if training.bf16 else torch.float16 if settings.fp16 else None
        self.loss_settings = self.loss_settings._replace(chunk=training.loss_chunk_size)
        self.prediction_loss_factor = settings.mtp_loss_scaling_factor
        self.activations = build_activation_memory(settings, training.recompute_activations)
        if settings.recompute_granularity == "selective":
            for layer in self.transformer_layers[: settings.recompute_num_layers]:
                recompute_modules(layer, settings.recompute_modules)

    @property
    def transformer_layers(self) -> list[TransformerLayer]:
        """Those of this stage, with those that predict further tokens."""
        predictions = cast(Iterable[PredictionLayer], self.predictions)
        return cast(list[TransformerLayer], [*self.layers.values(), *(each.layer for each in predictions)])

    @property
    def output_weight(self) -> Tensor:
        """The output head [V, D], or its rows in this process; the embedding itself if they are tied."""
        head = self.output or self.embedding
        assert head is not None, "the last stage has one of them"
        return head.weight

    def place_balance_biases(self) -> dict[str, PlacedWeight]:
        """The biases that balance experts by name: no weights, but a part of the model."""
        return {name: PlacedWeight(bias) for name, bias in moe.iterate_balance_biases(self)}

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the last norm, of the vocabulary of this process."""
        logits, softcap = hidden @ self.output_weight.to(hidden.dtype).T, self.spec.final_logit_softcapping
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    @property
    def _last_stage_embeds(self) -> bool:
        return not self.spec.untie_embeddings_and_output_weights or self.spec.mtp_num_layers > 0

    @property
    def has_tied_copy(self) -> bool:
        """Whether this stage and another one have the same embedding."""
        whole = self.stage.is_first and self.stage.is_last
        return not whole and self.embedding is not None and self._last_stage_embeds

    def is_copy(self, name: str) -> bool:
        """Whether a weight is that of another stage."""
        return name == "embedding.weight" and self.has_tied_copy and not self.stage.is_first

    def place_weights(self) -> dict[str, PlacedWeight]:
        """The weights of this process by name, with those of adapters."""
        named = dict(self.named_parameters())
        # Each step asks for them: sharding replaces the parameters, but not their names.
        for name in named.keys() - self._divisions.keys():
            self._divisions[name] = find_division(name, self.spec, self.layout)
        return {name: PlacedWeight(weight, self._divisions[name]) for name, weight in named.items()}

    def forward(
        self,
        x: Tensor,
        targets_BS: Tensor | None = None,
        scale: Tensor | None = None,
        examples_BS: Tensor | None = None,
        tokens_BS: Tensor | None = None,
        group: int = 0,
    ) -> Tensor:
        """Hidden states [B, S, D], in the last group of all after the last norm; with targets, `scale` x the sum of
        their losses.

        The loss is part of forward so that one graph is compiled, and so that FSDP gathers the output head for it.

        Args:
            x: Token ids [B, S] in the first group of all, hidden states in another one, which are those of a part of
                the sequence if processes share it. All other arguments are of the whole sequence.
            targets_BS: Used by the last group.
            scale: See `cross_entropy`.
            examples_BS: Number of each token's example in a packed sequence; examples do not see each other.
            tokens_BS: Token ids, in another than the first group.
            group: Which layers of this stage.
        """
        tokens_BS = x if tokens_BS is None else tokens_BS
        # The schedule of a pipeline gives each micro batch a vector of one.
        scale = None if scale is None else scale.reshape(())
        is_first = self.stage.is_first and group == 0
        is_last = self.stage.is_last and group == len(self.stage.groups) - 1
        hidden_BSD = self.embedding(x) if is_first and self.embedding is not None else x
        if self.compute_dtype is not None:
            hidden_BSD = hidden_BSD.to(self.compute_dtype)
        rotations, mask = self._compute_rotations_and_mask(tokens_BS, examples_BS, hidden_BSD.dtype)
        loss_weight = self._compute_loss_weight(targets_BS, scale)
        masks = self._build_masks(mask, tokens_BS)
        memory = self.activations if torch.is_grad_enabled() else None
        first = sum(map(len, self.stage.groups[:group]))
        for index, number in enumerate(self.stage.groups[group], first):
            layer = self.layers[str(number)]
            window = cast(TransformerLayer, layer).window
            inputs = hidden_BSD, rotations[window is not None], masks[window], loss_weight
            hidden_BSD = memory.run_layer(index, layer, *inputs) if memory else layer(*inputs)
        if is_last and self.norm is not None:
            hidden_BSD = self.norm(hidden_BSD)
        if targets_BS is None or not is_last:
            return hidden_BSD
        if self.objective is not None:
            return self.objective(hidden_BSD, self.output_weight, targets_BS, scale, examples_BS)
        if self.predictions and torch.is_grad_enabled():
            losses = self._predict_further(
                hidden_BSD, tokens_BS, targets_BS, scale, examples_BS, (rotations[0], masks[None], loss_weight)
            )
            hidden_BSD = add_loss(hidden_BSD, losses)
        return self._compute_loss(hidden_BSD, targets_BS, scale)

    def _compute_loss(self, hidden_BSD: Tensor, targets_BS: Tensor, scale: Tensor | None) -> Tensor:
        hidden_BSD = enter_tensor_region(hidden_BSD, self.layout)
        targets_BS = take_context(targets_BS, self.layout.context, 1)
        tensor, part = self.layout.tensor, None
        if tensor.size > 1:
            part = HeadPart(find_begin(self.spec.vocab_size, tensor), tensor.group)
        return cross_entropy(hidden_BSD, self.output_weight, targets_BS, scale, self.loss_settings, part)

    def _predict_further(
        self,
        hidden_BSD: Tensor,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        scale: Tensor | None,
        examples_BS: Tensor | None,
        inputs: tuple[Any, ...],
    ) -> Tensor:
        """The weighted loss of the tokens after the next one, from the hidden states after the last norm."""
        assert self.embedding is not None, "the last stage has it"
        if self.documents is not None:
            examples_BS = documents.number_documents(tokens_BS, self.documents.eod_id)
        losses = []
        for depth, prediction in enumerate(self.predictions, 1):
            embedded_BSD = self.embedding(shift_tokens(tokens_BS, depth, examples_BS, 0))
            args = hidden_BSD, embedded_BSD, *inputs
            index, memory = len(self.layers) + depth - 1, self.activations
            hidden_BSD = memory.run_layer(index, prediction, *args) if memory else prediction(*args)
            losses.append(self._compute_loss(hidden_BSD, shift_tokens(targets_BS, depth, examples_BS), scale))
        loss = torch.stack(losses).mean()
        self.prediction_loss += loss.detach()
        return loss * self.prediction_loss_factor

    def take_prediction_loss(self) -> Tensor | None:
        """`scale` x the summed loss of the layers of multi-token prediction since the last call; None without them."""
        if not self.spec.mtp_num_layers:
            return None
        taken = self.prediction_loss.clone()
        self.prediction_loss.zero_()
        return taken

    def _build_masks(self, mask: Tensor | None, tokens_BS: Tensor) -> dict[int | None, Tensor | None]:
        """The mask of this process's queries for the layers with each window; None for all keys that are not later, of
        which a window leaves the last ones."""
        length, context = tokens_BS.shape[1], self.layout.context
        masks: dict[int | None, Tensor | None] = {}
        for window in {layer.window for layer in self.transformer_layers}:
            if self.cache is not None and self.cache.positions_BS is not None:
                masks[window] = take_context(self.cache.build_mask(window), context, 2)
                continue
            is_short = window is not None and window < length
            # A part of the queries with a window, sinks or limited scores has no mask of its own.
            is_special = is_short or self.spec.attention_sinks or self.spec.attn_logit_softcapping is not None
            if (is_short and mask is not None) or (is_special and context.size > 1):
                limited = documents.limit_to_window(mask, window or length, length, tokens_BS.device)
                masks[window] = take_context(limited, context, 2)
            else:
                masks[window] = None if mask is None else take_context(mask, context, 2)
        return masks

    def _compute_loss_weight(self, targets_BS: Tensor | None, scale: Tensor | None) -> Tensor | None:
        """Share of these targets in the mean loss, with which losses of routers count; None if there are none."""
        if self.spec.num_experts is None or targets_BS is None or not torch.is_grad_enabled():
            return None
        if self.objective is not None:  # which counts something else than targets
            return None
        return count_targets(targets_BS) * (1.0 if scale is None else scale)

    def compute_rotary_tables(self, length: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Those of `rope.compute_tables` for the layers without a window, and for those with one."""
        table = rope.compute_tables(self.frequencies, length, dtype, rope.compute_table_scale(self.spec))
        has_own = self.spec.window_rotary_base is not None
        return [table, rope.compute_tables(self.window_frequencies, length, dtype) if has_own else table]

    def _compute_rotations_and_mask(
        self, tokens_BS: Tensor, examples_BS: Tensor | None, dtype: torch.dtype
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """The rotation of each position without and with a window, and the mask of the keys that each query sees; None
        for all earlier keys."""
        if self.cache is not None and self.cache.positions_BS is not None:
            positions_BS = take_context(self.cache.positions_BS, self.layout.context, 1)
            return self.cache.rotate(positions_BS, dtype), None
        tables = self.compute_rotary_tables(tokens_BS.shape[1], dtype)
        reset_positions = reset_attention = examples_BS is not None
        if self.documents is not None:
            eod_id, reset_positions, reset_attention = self.documents
            examples_BS = documents.number_documents(tokens_BS, eod_id)
        context, mask = self.layout.context, None
        if examples_BS is not None and reset_attention:
            mask = documents.build_attention_mask(examples_BS)
        if examples_BS is not None and reset_positions:
            positions_BS = take_context(documents.compute_positions(examples_BS), context, 1)
            return [(cosine[positions_BS], sine[positions_BS]) for cosine, sine in tables], mask
        return [(take_context(cosine, context, 0), take_context(sine, context, 0)) for cosine, sine in tables], mask


class Embedding(nn.Embedding):
    """Vectors of token ids. A process has those of some ids, and gives those of its part of the sequence."""

    def __init__(self, spec: ModelSpec, layout: Layout) -> None:
        super().__init__(share(spec.vocab_size, layout.tensor), spec.hidden_size)
        self.layout, self.begin = layout, find_begin(spec.vocab_size, layout.tensor)
        self.scale = spec.hidden_size**0.5 if spec.scale_embeddings else 1.0

    def forward(self, tokens_BS: Tensor) -> Tensor:
        found_BSD = self._find_vectors(take_context(tokens_BS, self.layout.context, 1))
        return found_BSD if self.scale == 1.0 else found_BSD * self.scale

    def _find_vectors(self, tokens_BS: Tensor) -> Tensor:
        if self.layout.tensor.size == 1:
            return super().forward(tokens_BS)
        index_BS = tokens_BS - self.begin
        is_own_BS = (index_BS >= 0) & (index_BS < self.num_embeddings)
        found_BSD = super().forward(index_BS.clamp(0, self.num_embeddings - 1))
        return leave_tensor_region(found_BSD * is_own_BS.unsqueeze(-1), self.layout)


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream, or with a normalized result."""

    def __init__(self, spec: ModelSpec, kind: LayerKind, layout: Layout) -> None:
        super().__init__()
        self.window = kind.window
        before, after = spec.pre_layernorm, spec.post_layernorm
        self.attention_norm = build_norm(spec) if before else nn.Identity()
        self.attention = (LatentAttention if spec.multi_latent_attention else Attention)(spec, layout, kind.window)
        self.attention_post_norm = build_norm(spec) if after else nn.Identity()
        self.feed_forward_norm = build_norm(spec) if before else nn.Identity()
        self.feed_forward = _build_feed_forward(spec, kind, layout)
        self.feed_forward_post_norm = build_norm(spec) if after else nn.Identity()

    def forward(
        self,
        x_BSD: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        loss_weight: Tensor | None = None,
    ) -> Tensor:
        x_BSD = x_BSD + self.attention_post_norm(self.attention(self.attention_norm(x_BSD), rotation, mask))
        return x_BSD + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x_BSD), loss_weight))


def _build_feed_forward(spec: ModelSpec, kind: LayerKind, layout: Layout) -> nn.Module:
    if not kind.moe:
        return FeedForward(spec, spec.ffn_hidden_size, layout)
    width = spec.moe_shared_expert_intermediate_size
    return MixtureOfExperts(spec, FeedForward(spec, width, layout) if width else None, layout)


class Attention(nn.Module):
    """Causal grouped-query attention; rows of `qkv` are queries, then keys, then values of the heads of a process."""

    def __init__(self, spec: ModelSpec, layout: Layout, window: int | None) -> None:
        super().__init__()
        self.layout, self.head_dim, self.window = layout, head_dim(spec), window
        self.heads = share(spec.num_attention_heads, layout.tensor)
        self.groups = share(num_query_groups(spec), layout.tensor)
        width = (self.heads + 2 * self.groups) * self.head_dim
        self.qkv = Linear(spec.hidden_size, width, bias=spec.add_qkv_bias or spec.add_bias_linear)
        self.output = RowLinear(
            spec.num_attention_heads * self.head_dim, spec.hidden_size, bias=spec.add_bias_linear, layout=layout
        )
        self.sinks = nn.Parameter(torch.empty(self.heads)) if spec.attention_sinks else None
        self.norms_all_heads, self.softcap = spec.qk_layernorm_across_heads, spec.attn_logit_softcapping
        widths = [self.head_dim * (count if self.norms_all_heads else 1) for count in (self.heads, self.groups)]
        self.query_norm = build_norm(spec, widths[0]) if spec.qk_layernorm else None
        self.key_norm = build_norm(spec, widths[1]) if spec.qk_layernorm else None
        # Attention divides scores by the square root of the width of a head.
        self.query_scale = (self.head_dim / (spec.query_pre_attn_scalar or self.head_dim)) ** 0.5
        self.cache: LayerCache | None = None

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        qkv_BSNC = self.qkv(enter_tensor_region(x_BSD, self.layout)).unflatten(-1, (-1, self.head_dim))
        q_BSHC, k_BSKC, v_BSKC = qkv_BSNC.split((self.heads, self.groups, self.groups), 2)
        if self.query_norm is not None and self.key_norm is not None:
            if self.norms_all_heads:
                q_BSHC = self.query_norm(q_BSHC.flatten(2)).view_as(q_BSHC)
                k_BSKC = self.key_norm(k_BSKC.flatten(2)).view_as(k_BSKC)
            else:
                q_BSHC, k_BSKC = self.query_norm(q_BSHC), self.key_norm(k_BSKC)
        q_BSHC = q_BSHC if self.query_scale == 1.0 else q_BSHC * self.query_scale
        q_BSHC, k_BSKC = ops.apply_rotary(q_BSHC, *rotation), ops.apply_rotary(k_BSKC, *rotation)
        q_BHSC, k_BKSC, v_BKSC = (each.transpose(1, 2) for each in (q_BSHC, k_BSKC, v_BSKC))
        mixed_BHSC = attend(
            q_BHSC, k_BKSC, v_BKSC, mask, self.layout.context, self.sinks, self.cache, self.softcap, self.window
        )
        return self.output(mixed_BHSC.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU, or with GELU; rows of `gate_up` are the gate, then the value that it gates."""

    def __init__(self, spec: ModelSpec, width: int, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.activate = ops.geglu if spec.ffn_activation == "gelu" else ops.swiglu
        self.gate_up = Linear(spec.hidden_size, 2 * share(width, layout.tensor), bias=False)
        self.down = RowLinear(width, spec.hidden_size, bias=False, layout=layout)

    def forward(self, x_BSD: Tensor, _: Tensor | None = None) -> Tensor:
        return self.down(self.activate(self.gate_up(enter_tensor_region(x_BSD, self.layout))))

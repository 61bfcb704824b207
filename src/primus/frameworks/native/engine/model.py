"""The decoder-only transformer that `native` trains.

Shape suffixes: B batch, S sequence, D model width, H query heads, K key/value heads, C channels of one head,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from primus.checkpoint.initial_values import draw_initial_value
from primus.config.schema import ModelSpec, TrainingConfig
from primus.data.training.masks import DocumentHandling
from primus.frameworks.native.engine import documents, moe, ops, rope
from primus.frameworks.native.engine.layers import Linear, RMSNorm
from primus.frameworks.native.engine.loss import count_targets, cross_entropy
from primus.frameworks.native.engine.mla import LatentAttention
from primus.frameworks.native.engine.moe import MixtureOfExperts
from primus.frameworks.native.support import check_model
from primus.models.counts import LayerKind, head_dim, list_layers, num_query_groups

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader
    from primus.session.settings.adapter_settings import AdapterSettings

ADAPTER = ".adapter."
"""In the name of each weight of an adapter."""


def build_model(
    spec: ModelSpec, device: torch.device | str, seed: int, dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model whose weights depend on `spec` and `seed` only, not on the device or the number of processes.

    On device `meta` nothing is allocated: shard the model with `step.prepare_model`, then call `initialize_weights`.

    Raises:
        UsageError: `spec` has something that native does not support.
    """
    with torch.device("meta"):
        model = Transformer(spec).to(dtype)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialize_weights(model, seed)
    return model


def initialize_weights(model: Transformer, seed: int) -> None:
    """Fill every weight in place, sharded or not, from `seed` and the weight's name (`draw_initial_value`)."""
    spec = model.spec
    fill_frequencies(model)
    with torch.no_grad():
        for name, weight in iterate_weights(model):
            fill_weight(weight, draw_initial_value(name, weight.shape, spec, seed))


def fill_frequencies(model: Transformer) -> None:
    """Fill the rotary frequencies, which a model that was on the meta device lacks, and no checkpoint holds."""
    model.frequencies.copy_(rope.compute_frequencies(model.spec, rope.count_rotary_channels(model.spec)))
    moe.fill_buffers(model)


def load_weights(model: Transformer, weights: WeightReader) -> None:
    """Fill every weight in place, sharded or not, from weights in hub names.

    Raises:
        PrimusError: A weight is missing, or has another shape.
    """
    from primus.checkpoint.renaming import EngineNames  # only with `load:`

    named = EngineNames(weights, model.spec, "native")
    fill_frequencies(model)
    with torch.no_grad():
        for name, weight in iterate_weights(model):
            fill_weight(weight, named.read(name))


def iterate_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model itself, without those of adapters, and the biases that balance experts."""
    named = chain(model.named_parameters(), moe.iterate_balance_biases(model))
    return ((name, weight) for name, weight in named if ADAPTER not in name)


class Transformer(nn.Module):
    """Token ids to hidden states, or with targets to their loss."""

    frequencies: Tensor
    """Rotary frequencies [C / 2], in float32 or wider; not part of the state."""

    def __init__(self, spec: ModelSpec) -> None:
        check_model(spec)
        super().__init__()
        self.spec = spec
        self.compute_dtype: torch.dtype | None = None
        """Of the passes; that of the parameters when None. Parameters, gradients and optimizer keep theirs."""
        self.recompute = False
        """Whether the backward pass computes the activations of each layer again."""
        self.loss_chunk_size: int | None = None
        """Tokens whose logits are in memory at once; chosen from the vocabulary when None."""
        self.documents: DocumentHandling | None = None
        self.adapters: AdapterSettings | None = None
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(spec, kind) for kind in list_layers(spec))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        tied = not spec.untie_embeddings_and_output_weights
        self.output = None if tied else Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.register_buffer("frequencies", torch.empty(rope.count_rotary_channels(spec) // 2), persistent=False)

    def configure(self, training: TrainingConfig) -> None:
        """Compute as an experiment asks for."""
        self.compute_dtype = torch.bfloat16 if training.bf16 else None
        self.recompute, self.loss_chunk_size = training.recompute_activations, training.loss_chunk_size

    @property
    def output_weight(self) -> Tensor:
        """The output head [V, D]; the embedding itself if they are tied."""
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        scale: Tensor | None = None,
        examples_BS: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, S, D] after the last norm; with targets, `scale` x the sum of their losses.

        `examples_BS` is the number of each token's example in a packed sequence; examples do not see each other.

        The loss is part of forward so that one graph is compiled, and so that FSDP gathers the output head for it.
        """
        hidden_BSD = self.embedding(tokens_BS)
        if self.compute_dtype is not None:
            hidden_BSD = hidden_BSD.to(self.compute_dtype)
        rotation, mask = self._compute_rotation_and_mask(tokens_BS, examples_BS, hidden_BSD.dtype)
        loss_weight = self._compute_loss_weight(targets_BS, scale)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                hidden_BSD = checkpoint(layer, hidden_BSD, rotation, mask, loss_weight, use_reentrant=False)
            else:
                hidden_BSD = layer(hidden_BSD, rotation, mask, loss_weight)
        hidden_BSD = self.norm(hidden_BSD)
        if targets_BS is None:
            return hidden_BSD
        return cross_entropy(hidden_BSD, self.output_weight, targets_BS, scale, self.loss_chunk_size)

    def _compute_loss_weight(self, targets_BS: Tensor | None, scale: Tensor | None) -> Tensor | None:
        """Share of these targets in the mean loss, with which losses of routers count; None if there are none."""
        if self.spec.num_experts is None or targets_BS is None or not torch.is_grad_enabled():
            return None
        return count_targets(targets_BS) * (1.0 if scale is None else scale)

    def _compute_rotation_and_mask(
        self, tokens_BS: Tensor, examples_BS: Tensor | None, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """The rotation of each position, and the mask of the keys that each query sees; None for all earlier keys."""
        cosine, sine = rope.compute_tables(
            self.frequencies, tokens_BS.shape[1], dtype, rope.compute_table_scale(self.spec)
        )
        reset_positions = reset_attention = examples_BS is not None
        if self.documents is not None:
            eod_id, reset_positions, reset_attention = self.documents
            examples_BS = documents.number_documents(tokens_BS, eod_id)
        if examples_BS is None:
            return (cosine, sine), None
        if reset_positions:
            positions_BS = documents.compute_positions(examples_BS)
            cosine, sine = cosine[positions_BS], sine[positions_BS]
        return (cosine, sine), documents.build_attention_mask(examples_BS) if reset_attention else None


class TransformerLayer(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream."""

    def __init__(self, spec: ModelSpec, kind: LayerKind) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.attention = LatentAttention(spec) if spec.multi_latent_attention else Attention(spec)
        self.feed_forward_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.feed_forward = _build_feed_forward(spec, kind)

    def forward(
        self,
        x_BSD: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        loss_weight: Tensor | None = None,
    ) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotation, mask)
        return x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD), loss_weight)


def _build_feed_forward(spec: ModelSpec, kind: LayerKind) -> nn.Module:
    if not kind.moe:
        return FeedForward(spec.hidden_size, spec.ffn_hidden_size)
    width = spec.moe_shared_expert_intermediate_size
    return MixtureOfExperts(spec, FeedForward(spec.hidden_size, width) if width else None)


class Attention(nn.Module):
    """Causal grouped-query attention; rows of `qkv` are queries, then keys, then values."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = spec.num_attention_heads, num_query_groups(spec), head_dim(spec)
        width = (self.heads + 2 * self.groups) * self.head_dim
        self.qkv = Linear(spec.hidden_size, width, bias=spec.add_qkv_bias)
        self.output = Linear(self.heads * self.head_dim, spec.hidden_size, bias=False)
        self.query_norm = RMSNorm(self.head_dim, spec.norm_epsilon) if spec.qk_layernorm else None
        self.key_norm = RMSNorm(self.head_dim, spec.norm_epsilon) if spec.qk_layernorm else None

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        qkv_BSNC = self.qkv(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHC, k_BSKC, v_BSKC = qkv_BSNC.split((self.heads, self.groups, self.groups), 2)
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHC, k_BSKC = self.query_norm(q_BSHC), self.key_norm(k_BSKC)
        q_BSHC, k_BSKC = ops.apply_rotary(q_BSHC, *rotation), ops.apply_rotary(k_BSKC, *rotation)
        mixed_BHSC = ops.causal_attention(q_BSHC.transpose(1, 2), k_BSKC.transpose(1, 2), v_BSKC.transpose(1, 2), mask)
        return self.output(mixed_BHSC.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU; rows of `gate_up` are the gate, then the value that it gates."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * width, bias=False)
        self.down = Linear(width, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, _: Tensor | None = None) -> Tensor:
        return self.down(ops.swiglu(self.gate_up(x_BSD)))


def fill_weight(weight: Tensor, value: Tensor) -> None:
    """Copy `value`, or this process's shard of it, into `weight`."""
    if not isinstance(weight, DTensor):
        weight.copy_(value)
        return
    value = value.to(weight.to_local().device)
    weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None))

"""Weights under their names on the Hugging Face Hub, as this process's part of a model of megatron-core."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from primus.config.schema import ModelSpec
from primus.errors import PrimusError
from primus.frameworks.megatron.shards import LayerSpecKind, MegatronShard, RankLayout

if TYPE_CHECKING:
    from primus.checkpoint.weights import WeightReader

EXPERT_BIAS = "router.expert_bias"
"""End of the name of the only buffer that is a weight."""


def copy_weights(model: nn.Module, spec: ModelSpec, weights: WeightReader) -> None:
    """Copy weights in hub names into the model of this process, which reads only its own part.

    Raises:
        PrimusError: The weights are of another model.
    """
    own = collect_tensors(model)
    shard = MegatronShard(weights, spec, find_layout(model, own), find_layer_spec(own))
    given = shard.list_tensors()
    if own.keys() != given.keys():
        name = sorted(own.keys() ^ given.keys())[0]
        lack = "the weights lack it" if name in own else "the model has no such tensor"
        raise PrimusError(f"the weights do not fit this model of megatron-core: {name}: {lack}")
    with torch.no_grad():
        for name, tensor in own.items():
            if tuple(tensor.shape) != tuple(given[name].shape):
                found, wanted = list(given[name].shape), list(tensor.shape)
                raise PrimusError(f"{name} has shape {found}, and {wanted} in this model of megatron-core")
            tensor.copy_(shard.read(name))


def collect_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the biases of experts, by name, in place: what is copied into them is in the model."""
    biases = {name: tensor for name, tensor in model.named_buffers() if name.endswith(EXPERT_BIAS)}
    return dict(model.named_parameters()) | biases


def find_layer_spec(own: Collection[str]) -> LayerSpecKind:
    """The layer spec of a model, from the names of its tensors: Transformer Engine fuses norms into projections."""
    return "transformer_engine" if any(name.endswith(".layer_norm_weight") for name in own) else "local"


def find_layout(model: nn.Module, own: Mapping[str, Tensor]) -> RankLayout:
    """The place of this process in the layout; pipeline stages may have different numbers of layers."""
    config: TransformerConfig = model.config  # type: ignore[assignment]
    layers: Any = model.decoder.layers  # type: ignore[union-attr]
    experts = config.num_moe_experts // config.expert_model_parallel_size if config.num_moe_experts else None
    return RankLayout(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=config.tensor_model_parallel_size,
        first_layer=layers[0].layer_number - 1 if len(layers) else 0,
        num_layers=len(layers),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        first_expert=parallel_state.get_expert_model_parallel_rank() * (experts or 0),
        num_experts=experts,
        padded_vocab_size=_find_padded_vocab_size(config, own),
    )


def _find_padded_vocab_size(config: TransformerConfig, own: Mapping[str, Tensor]) -> int | None:
    """Rows of the embedding over all ranks; None on a stage without it."""
    found = [own[name] for name in ("embedding.word_embeddings.weight", "output_layer.weight") if name in own]
    return found[0].shape[0] * config.tensor_model_parallel_size if found else None

"""A model with the weights of a checkpoint, to compute with and not to train."""

from __future__ import annotations

import torch
from torch import Tensor

from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec
from primus.frameworks.native.engine.model import Transformer, load_weights


@torch.no_grad()
def compute_logits(spec: ModelSpec, weights: WeightReader, tokens_BS: Tensor) -> Tensor:
    """Logits [B, S, V] of a model with weights in hub names, float32 on the CPU.

    Raises:
        UsageError: native does not support this model.
    """
    model = build_loaded_model(spec, weights)
    return model.compute_logits(model(tokens_BS))


def build_loaded_model(spec: ModelSpec, weights: WeightReader, device: torch.device | str = "cpu") -> Transformer:
    """A model in float32, with weights in hub names.

    Raises:
        UsageError: native does not support this model.
    """
    with torch.device("meta"):
        model = Transformer(spec)
    model.to_empty(device=device)
    load_weights(model, weights)
    return model

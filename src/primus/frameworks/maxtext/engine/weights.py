"""Weights of MaxText's decoders by their names on the Hugging Face Hub.

MaxText keeps a kernel as [inputs, outputs], with the heads as dimensions of their own, and those of all layers as one
array, whose axis of layers is `param_scan_axis`; the experts of a layer are one array, too. Its rope of Llama 3.1
rotates neighboring channels of a head instead of its halves (maxtext/layers/embeddings.py).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OUTER = {
    "token_embedder.embedding": "model.embed_tokens.weight",
    "decoder.decoder_norm.scale": "model.norm.weight",
    "decoder.logits_dense.kernel": "lm_head.weight",
}
INNER = {
    "pre_self_attention_layer_norm.scale": "input_layernorm.weight",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm.weight",
    "self_attention.query.kernel": "self_attn.q_proj.weight",
    "self_attention.key.kernel": "self_attn.k_proj.weight",
    "self_attention.value.kernel": "self_attn.v_proj.weight",
    "self_attention.out.kernel": "self_attn.o_proj.weight",
    "self_attention.query.bias": "self_attn.q_proj.bias",
    "self_attention.key.bias": "self_attn.k_proj.bias",
    "self_attention.value.bias": "self_attn.v_proj.bias",
    "self_attention.query_norm.scale": "self_attn.q_norm.weight",
    "self_attention.key_norm.scale": "self_attn.k_norm.weight",
    "mlp.wi_0.kernel": "mlp.gate_proj.weight",
    "mlp.wi_1.kernel": "mlp.up_proj.weight",
    "mlp.wo.kernel": "mlp.down_proj.weight",
    "MoeBlock_0.gate.kernel": "block_sparse_moe.gate.weight",
    "moe_block.gate.kernel": "mlp.gate.weight",
}
EXPERTS = {
    "MoeBlock_0.wi_0": "block_sparse_moe.experts.{}.w1.weight",
    "MoeBlock_0.wi_1": "block_sparse_moe.experts.{}.w3.weight",
    "MoeBlock_0.wo": "block_sparse_moe.experts.{}.w2.weight",
    "moe_block.wi_0": "mlp.experts.{}.gate_proj.weight",
    "moe_block.wi_1": "mlp.experts.{}.up_proj.weight",
    "moe_block.wo": "mlp.experts.{}.down_proj.weight",
}
"""The same for experts of Mixtral and Qwen3-MoE; from the same file."""
_LAYER = re.compile(r"decoder\.layers(?:_(\d+))?\.(.+)")
_ROTATED = re.compile(r"self_attention\.(query|key)(_norm)?\.")


class WeightPlace(NamedTuple):
    """A weight in an array of MaxText."""

    hub_name: str
    part: tuple[int | slice, ...]
    """Where it is along each axis of the array: its index along those of layers and experts."""
    shape: tuple[int, ...]
    """Its shape in MaxText."""
    is_interleaved: bool
    """Whether neighbors of the last dimension are what are halves on the hub."""
    factor: float
    """MaxText's value divided by the hub's."""

    def to_maxtext(self, values: NDArray) -> NDArray:
        """Values of the hub in MaxText's layout."""
        values = (values.T if values.ndim > 1 and not self.is_embedding else values).reshape(self.shape)
        if self.is_interleaved:
            halves = values.reshape(*values.shape[:-1], 2, -1)
            values = np.moveaxis(halves, -2, -1).reshape(self.shape)
        return values if self.factor == 1.0 else values * np.float32(self.factor)

    def to_hub(self, values: NDArray) -> NDArray:
        """Values of MaxText in the layout of the hub."""
        if self.is_interleaved:
            pairs = values.reshape(*values.shape[:-1], -1, 2)
            values = np.moveaxis(pairs, -1, -2).reshape(self.shape)
        if self.factor != 1.0:
            values = values / np.float32(self.factor)
        if self.is_embedding or self.hub_name.endswith((".bias", "norm.weight")):
            return values.reshape(self.hub_shape)
        return values.reshape(self.hub_shape[::-1]).T

    @property
    def is_embedding(self) -> bool:
        return self.hub_name == "model.embed_tokens.weight"

    @property
    def hub_shape(self) -> tuple[int, ...]:
        """Its shape on the hub."""
        if self.is_embedding:
            return self.shape
        if self.hub_name.endswith((".bias", "norm.weight")):
            return (math.prod(self.shape),)
        inputs = 2 if self.hub_name.endswith("o_proj.weight") else 1
        return (math.prod(self.shape[inputs:]), math.prod(self.shape[:inputs]))


def list_places(
    name: str, shape: tuple[int, ...], axis: int, *, is_interleaved: bool, query_factor: float
) -> list[WeightPlace]:
    """The weights in an array of MaxText.

    Args:
        name: Name of the array, such as ``decoder.layers.mlp.wo.kernel``.
        shape: Shape of the array.
        axis: Axis of the layers.
        is_interleaved: Whether rope rotates neighboring channels.
        query_factor: What the projection of queries is multiplied by.

    Raises:
        KeyError: The array is not one of these decoders.
    """
    if name in OUTER:
        return [WeightPlace(OUTER[name], (slice(None),) * len(shape), shape, False, 1.0)]
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    number, inner = match.groups()
    rotates = is_interleaved and _ROTATED.match(inner) is not None
    factor = query_factor if inner.startswith("self_attention.query.") else 1.0
    layer_axis = axis if number is None else None
    # The experts are the first axis of a layer's array.
    expert_axis = int(layer_axis == 0) if inner in EXPERTS else None
    split = (layer_axis, expert_axis)
    one = tuple(size for place, size in enumerate(shape) if place not in split)
    axes: list[Iterable[int | slice]] = [
        range(size) if place in split else (slice(None),) for place, size in enumerate(shape)
    ]
    return [
        WeightPlace(
            f"model.layers.{number if layer_axis is None else part[layer_axis]}."
            f"{INNER[inner] if expert_axis is None else EXPERTS[inner].format(part[expert_axis])}",
            part,
            one,
            rotates,
            factor,
        )
        for part in itertools.product(*axes)
    ]

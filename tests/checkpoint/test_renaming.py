"""Weights under the names of an engine are the same weights, whole or some rows at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from primus.backends.native.model import build_model
from primus.checkpoint.family import list_hub_shapes
from primus.checkpoint.initial_weights import InitialWeights
from primus.checkpoint.renaming import EngineNames, HubNames
from primus.checkpoint.weights import TensorDict
from primus.config.schema import ModelSpec
from primus.errors import PrimusError

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab_size": 50,
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied llama": {"untie_embeddings_and_output_weights": False},
    "qwen2.5": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True, "untie_embeddings_and_output_weights": False},
}


def draw_hub_tensors(spec: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in list_hub_shapes(spec).items()}


@pytest.mark.parametrize("extra", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize("engine", ["native", "torchtitan", "megatron"])
def test_renaming_there_and_back_keeps_every_tensor(engine: str, extra: dict[str, Any]) -> None:
    spec = ModelSpec(**SHAPE, **extra)
    hub = draw_hub_tensors(spec)
    renamed = EngineNames(TensorDict(hub), spec, engine)
    there = {name: renamed.read(name) for name in renamed.list_tensors()}
    assert {name: tuple(tensor.shape) for name, tensor in there.items()} == {
        name: info.shape for name, info in renamed.list_tensors().items()
    }
    back = HubNames(TensorDict(there), spec, engine)
    assert list(back.list_tensors()) == list(hub)
    assert all(torch.equal(back.read(name), tensor) for name, tensor in hub.items())


@pytest.mark.parametrize("engine", ["native", "torchtitan", "megatron"])
def test_rows_of_a_renamed_tensor_are_rows_of_the_whole_tensor(engine: str) -> None:
    spec = ModelSpec(**SHAPE, add_qkv_bias=True)
    hub = draw_hub_tensors(spec)
    renamed = EngineNames(TensorDict(hub), spec, engine)
    there = {name: renamed.read(name) for name in renamed.list_tensors()}
    for weights in (renamed, HubNames(TensorDict(there), spec, engine)):
        for name in weights.list_tensors():
            whole = weights.read(name)
            for rows in (slice(3, 11), slice(len(whole) - 5, None), slice(0, 0)):
                assert torch.equal(weights.read(name, rows), whole[rows])


@pytest.mark.parametrize("extra", DENSE.values(), ids=DENSE)
def test_initial_weights_are_those_of_the_native_model(extra: dict[str, Any]) -> None:
    spec = ModelSpec(**SHAPE, **extra)
    native = build_model(spec, "cpu", seed=5).state_dict()
    renamed = EngineNames(InitialWeights(spec, 5), spec, "native")
    assert renamed.list_tensors().keys() == native.keys()
    assert all(torch.equal(renamed.read(name), tensor) for name, tensor in native.items())


def test_a_source_without_a_tensor_is_refused_by_its_name() -> None:
    spec = ModelSpec(**SHAPE)
    hub = draw_hub_tensors(spec)
    del hub["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(PrimusError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        EngineNames(TensorDict(hub), spec, "native")


def test_a_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    spec = ModelSpec(**SHAPE)
    hub = {**draw_hub_tensors(spec), "model.norm.weight": torch.ones(25)}
    with pytest.raises(PrimusError, match=r"model\.norm\.weight has shape \[25\], and \[24\]"):
        EngineNames(TensorDict(hub), spec, "native")

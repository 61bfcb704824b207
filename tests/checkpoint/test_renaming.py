"""Weights under the names of an engine are the same weights, whole or some rows at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from checkpoint_models import DENSE, NATIVE, SPARSE, draw_hub_tensors, make_spec
from primus import registry
from primus.checkpoint.family import UNSUPPORTED, list_hub_shapes
from primus.checkpoint.initial_weights import InitialWeights
from primus.checkpoint.renaming import EngineNames, HubNames
from primus.checkpoint.weights import TensorDict
from primus.config.extended_files import load_model
from primus.errors import PrimusError, UsageError
from primus.frameworks.native.engine.model import build_model
from primus.models.counts import count_parameters

MODELS = registry.PACKAGE / "presets" / "models"


@pytest.mark.parametrize(
    ("extra", "engine"),
    [
        pytest.param(extra, engine, id=f"{name}-{engine}")
        for name, extra in {**DENSE, **SPARSE}.items()
        for engine in ("native", "torchtitan", "megatron")
        if engine != "native" or name in NATIVE
    ],
)
def test_renaming_there_and_back_keeps_every_tensor(engine: str, extra: dict[str, Any]) -> None:
    spec = make_spec(**extra)
    hub = draw_hub_tensors(spec)
    renamed = EngineNames(TensorDict(hub), spec, engine)
    there = {name: renamed.read(name) for name in renamed.list_tensors()}
    assert {name: tuple(tensor.shape) for name, tensor in there.items()} == {
        name: info.shape for name, info in renamed.list_tensors().items()
    }
    back = HubNames(TensorDict(there), spec, engine)
    assert list(back.list_tensors()) == list(hub)
    assert all(torch.equal(back.read(name), tensor) for name, tensor in hub.items())


@pytest.mark.parametrize(
    ("engine", "extra"),
    [
        ("native", DENSE["qwen2.5"]),
        ("native", SPARSE["mixtral"]),
        ("torchtitan", {}),
        ("megatron", DENSE["qwen2.5"]),
        ("megatron", SPARSE["gpt_oss"]),
    ],
)
def test_rows_of_a_renamed_tensor_are_rows_of_the_whole_tensor(engine: str, extra: dict[str, Any]) -> None:
    spec = make_spec(**extra)
    hub = draw_hub_tensors(spec)
    renamed = EngineNames(TensorDict(hub), spec, engine)
    there = {name: renamed.read(name) for name in renamed.list_tensors()}
    for weights in (renamed, HubNames(TensorDict(there), spec, engine)):
        for name in weights.list_tensors():
            whole = weights.read(name)
            for rows in (slice(3, 11), slice(len(whole) - 5, None), slice(0, 0)):
                assert torch.equal(weights.read(name, rows), whole[rows])


@pytest.mark.parametrize("extra", NATIVE.values(), ids=NATIVE)
def test_initial_weights_are_those_of_the_native_model(extra: dict[str, Any]) -> None:
    spec = make_spec(**extra)
    native = build_model(spec, "cpu", seed=5).state_dict()
    renamed = EngineNames(InitialWeights(spec, 5), spec, "native")
    assert renamed.list_tensors().keys() == native.keys()
    assert all(torch.equal(renamed.read(name), tensor) for name, tensor in native.items())
    for name, tensor in native.items():
        if tensor.dim() == 3:  # a stack of experts, of which one is read at a time
            assert torch.equal(renamed.read(name, slice(2, 3)), tensor[2:3])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"lack model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"model.norm.weight": torch.ones(25)}, r"model\.norm\.weight has shape \[25\], and \[24\]"),
    ],
)
def test_a_tensor_that_lacks_or_has_another_shape_is_named(change: dict[str, torch.Tensor | None], told: str) -> None:
    spec = make_spec()
    hub = {name: tensor for name, tensor in (draw_hub_tensors(spec) | change).items() if tensor is not None}
    with pytest.raises(PrimusError, match=told):
        EngineNames(TensorDict(hub), spec, "native")


SPECS = {file.stem: load_model(file.stem) for file in MODELS.glob("[!_]*.yaml")}
REFUSED = {
    name
    for name, spec in SPECS.items()
    if (spec.hybrid_layer_pattern or spec.post_layernorm or spec.dsa_indexer_n_heads)
    and not name.startswith(("gemma2", "gemma3", "olmo2"))
}
"""Presets of Gemma 4, Grok, Kimi K3, LFM2, Mamba, GLM-5, DeepSeek-V4, Qwen3.5 and Zebra-Llama."""


@pytest.mark.parametrize("preset", sorted(SPECS.keys() - REFUSED - {"minimax_m2.5"}))
def test_hub_tensors_of_a_preset_have_its_number_of_parameters(preset: str) -> None:
    shapes = list_hub_shapes(SPECS[preset])
    count = count_parameters(SPECS[preset])
    assert sum(math.prod(shape) for shape in shapes.values()) == count.total_parameters + count.mtp


@pytest.mark.parametrize("preset", [*sorted(REFUSED), "minimax_m2.5"])
def test_a_model_without_weight_names_is_refused_by_the_field(preset: str) -> None:
    with pytest.raises(UsageError, match=rf"^({'|'.join(UNSUPPORTED)}): .* cannot be converted"):
        list_hub_shapes(SPECS[preset])


@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_rows_between_the_borders_of_a_fused_tensor_are_read_without_a_copy(engine: str) -> None:
    spec = make_spec()
    hub = draw_hub_tensors(spec)
    renamed = EngineNames(TensorDict(hub), spec, engine)
    fused, border = next(
        (name, rows[0]) for name in renamed.list_tensors() if len(rows := renamed.list_borders(name)) == 1
    )
    gate, up = hub["model.layers.0.mlp.gate_proj.weight"], hub["model.layers.0.mlp.up_proj.weight"]
    for rows, source in ((slice(0, border), gate), (slice(border + 2, None), up[2:])):
        assert renamed.read(fused, rows).data_ptr() == source.data_ptr()
    assert torch.equal(renamed.read(fused, slice(border - 1, border + 1)), torch.stack([gate[-1], up[0]]))

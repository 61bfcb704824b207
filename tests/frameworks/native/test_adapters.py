"""Adapters of native: the model under them stays, their files for peft, and the weights with them merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from msgspec import structs

from primus.checkpoint.formats.adapter import AdaptedWeights
from primus.checkpoint.initial_weights import InitialWeights
from primus.config.extended_files import load_model
from primus.config.schema import OptimizerConfig
from primus.errors import PrimusError, UsageError
from primus.experiment import resolve_experiment
from primus.frameworks.native.engine import adapters
from primus.frameworks.native.engine.loaded_model import compute_logits
from primus.frameworks.native.engine.model import ADAPTER, Transformer, build_model
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step
from primus.session.settings.adapter_settings import AdapterSettings

SPEC = load_model("tiny.yaml")
SETTINGS = AdapterSettings(peft="lora", peft_dim=4, peft_alpha=8)
KINDS = {
    "lora": SETTINGS,
    "rslora": structs.replace(SETTINGS, peft_rslora=True),
    "dora": structs.replace(SETTINGS, peft="dora"),
}
PEFT_DORA = [
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
    "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight",
    "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector",
]
"""Tensors of a layer as peft 0.21.2 saves them."""


def build_adapted(settings: AdapterSettings) -> Transformer:
    model = build_model(SPEC, "cpu", 1)
    adapters.add_adapters(model, settings)
    adapters.initialize_adapters(model, 1)
    return model


def train_steps(model: Transformer, tokens: torch.Tensor) -> None:
    trainable = prepare_model(model, device="cpu")
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
    for _ in range(2):
        train_step(trainable, optimizer, [(tokens, tokens)], learning_rate=1e-2, clip_grad=1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_files_have_the_logits_of_the_trained_model(tmp_path: Path, kind: str) -> None:
    tokens = torch.randint(SPEC.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    model, plain = build_adapted(KINDS[kind]), build_model(SPEC, "cpu", 1)
    assert torch.equal(model(tokens), plain(tokens)), "training begins with the model as it is"
    train_steps(model, tokens)
    weights = {name: weight for name, weight in model.named_parameters() if ADAPTER not in name}
    assert all(torch.equal(weights[name], weight) for name, weight in plain.named_parameters())
    adapters.collect_adapter_files(model, str(tmp_path)).write(tmp_path / "adapter")
    merged = AdaptedWeights(InitialWeights(SPEC, 1), tmp_path / "adapter")
    expected = (model(tokens) @ model.output_weight.T).detach()
    assert torch.allclose(compute_logits(SPEC, merged, tokens), expected, atol=1e-5)
    assert not torch.allclose(compute_logits(SPEC, InitialWeights(SPEC, 1), tokens), expected, atol=1e-3)
    config = tmp_path / "adapter" / "adapter_config.json"
    written = json.loads(config.read_text())
    assert (written["use_dora"], written["use_rslora"]) == (kind == "dora", kind == "rslora")
    names = [name for name in merged._file.list_tensors() if name.startswith(PEFT_DORA[0].partition(".lora_")[0])]
    assert names == (PEFT_DORA if kind == "dora" else PEFT_DORA[:2])
    # A pattern of peft gives one matrix another scale.
    place = ".".join(PEFT_DORA[0].split(".")[2:-2])
    config.write_text(json.dumps(written | {"alpha_pattern": {"layers.0.mlp.down_proj": 0}}))
    base, changed = InitialWeights(SPEC, 1), AdaptedWeights(InitialWeights(SPEC, 1), tmp_path / "adapter")
    assert kind == "dora" or torch.equal(changed.read(f"{place}.weight"), base.read(f"{place}.weight"))
    assert torch.equal(*(each.read(f"{place.replace('.0.', '.1.')}.weight") for each in (changed, merged)))
    config.write_text(json.dumps(written | {"modules_to_save": ["lm_head"]}))
    with pytest.raises(PrimusError, match="modules_to_save: only LoRA and DoRA are merged"):
        AdaptedWeights(InitialWeights(SPEC, 1), tmp_path / "adapter")


def test_a_pattern_chooses_layers() -> None:
    chosen = AdapterSettings(peft="lora", peft_target_modules=("*.layers.1.*.linear_qkv", "linear_fc2"))
    names = [name for name, _ in build_adapted(chosen).named_parameters() if name.endswith("up_FR")]
    places = ("0.feed_forward.down", "1.attention.qkv", "1.feed_forward.down")
    assert names == [f"layers.{place}.adapter.up_FR" for place in places]
    with pytest.raises(UsageError, match="matches no matrix"):
        build_adapted(AdapterSettings(peft="lora", peft_target_modules=("*.layers.9.*.linear_qkv",)))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"peft_dim": 0}, "peft_dim: 0: Expected `int` >= 1"),
        ({"peft_target_modules": ["linear_qvk"]}, "did you mean 'linear_qkv'"),
        ({"peft": "dora", "peft_dropout": 0.1}, "native trains dora without it"),
        ({"load": None}, "load names no model to adapt"),
        ({"peft_dmi": 8}, "did you mean 'peft_dim'"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_key(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    overrides = {"mock_data": True, "load": "hf:a/b", "finetune": True, "peft": "lora", **given}
    module = {"framework": "native", "config": "sft_trainer.yaml", "model": "tiny.yaml", "overrides": overrides}
    (tmp_path / "e.yaml").write_text(yaml.safe_dump({"modules": {"post_trainer": module}}))
    with pytest.raises(UsageError) as caught:
        resolve_experiment(tmp_path / "e.yaml", ("--seq_length", "128"), {})
    assert problem in f"{caught.value.problem} {caught.value.hint}"

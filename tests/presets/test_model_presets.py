"""Each model preset is a valid model, says what it is, and is listed in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from primus import registry
from primus.config.extended_files import load_model
from primus.config.load import load_experiment
from primus.config.schema import ModelSpec, TrainingConfig
from primus.errors import UsageError
from primus.models.counts import count_parameters
from primus.models.model_checks import check

ROOT = Path(__file__).parents[2]
PRESETS = registry.PACKAGE / "presets" / "models"
NAMES = registry.list_plug_ins("models")
FILES = sorted(PRESETS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_model_that_can_be_built(name: str) -> None:
    check(load_model(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_line_states_the_parameters_that_the_shape_has(name: str) -> None:
    count = count_parameters(load_model(name))
    line = registry.read_summary("models", name)
    stated = re.match(r"[^:]+: (?P<total>[\d.]+[KMB])( \((?P<active>[\d.]+[MB]) active\))? parameters; ", line)
    assert stated, line
    assert stated["total"] == short(count.total_parameters)
    assert stated["active"] == (
        short(count.active_parameters) if count.active_parameters != count.total_parameters else None
    )


def short(number: int) -> str:
    """`number` with three digits: 8.03B, 494M, 152K."""
    unit, letter = next((unit, letter) for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= unit)
    digits = 2 - (number >= 10 * unit) - (number >= 100 * unit)
    return f"{number / unit:.{digits}f}{letter}"


@pytest.mark.parametrize("name", [name for name in NAMES if load_model(name).hf_name])
def test_the_first_line_names_the_published_model(name: str) -> None:
    assert load_model(name).hf_name in registry.read_summary("models", name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_preset_changes_something_in_what_it_extends(file: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    base = tree.pop("extends", None)
    inherited = resolved(base) if base else {}
    repeated = [key for key, value in tree.items() if inherited.get(key) == value]
    assert not repeated, f"{file.name} repeats {repeated} of {base}"


def resolved(name: str) -> dict[str, object]:
    """A preset with what it extends, read without the loader under test."""
    tree: dict[str, object] = yaml.safe_load((PRESETS / name).read_text())
    base = tree.pop("extends", None)
    return (resolved(str(base)) if base else {}) | tree


@pytest.mark.parametrize("name", NAMES)
def test_the_loader_reads_what_the_files_say(name: str) -> None:
    spec = load_model(name)
    said = resolved(f"{name}.yaml")
    assert {key for key in said if not hasattr(spec, key)} <= {"fp8"}, (
        "a model says nothing of training but its precision"
    )
    wrong = {key: value for key, value in said.items() if getattr(spec, key, value) != value}
    assert not wrong


def test_names_as_users_of_primus_type_them() -> None:
    exact = load_model("llama3.1_8B.yaml")
    assert load_model("llama3.1-8b") == exact
    assert load_model("LLAMA3.1_8B") == exact
    assert not [name for name in NAMES if name.startswith("_")], "family bases are not models"


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        load_model("lama3.1_8B")
    assert "llama3.1_8B" in str(caught.value)


def test_an_unknown_key_in_a_preset_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("extends: llama3.1_8B.yaml\nnum_layer: 2\n")
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text("modules: {pre_trainer: {model: own.yaml}}\n")
    with pytest.raises(UsageError) as caught:
        load_experiment(experiment, environ={})
    assert "own.yaml:2: unknown key 'num_layer'; did you mean 'num_layers'?" in str(caught.value)


def test_a_preset_of_ones_own_may_extend_a_shipped_one(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("extends: qwen3_0.6B.yaml\nnum_layers: 2\n")
    spec = load_model(str(own))
    assert (spec.num_layers, spec.qk_layernorm, spec.kv_channels) == (2, True, 128)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama2_7B", {"rope_type": "default", "rotary_base": 1e4, "norm_epsilon": 1e-5}),
        ("llama3_8B", {"rope_type": "default", "rotary_base": 5e5, "max_position_embeddings": 8192}),
        ("llama3.1_8B", {"rope_type": "llama3", "rotary_scaling_factor": 8, "original_max_position_embeddings": 8192}),
        ("llama3.1_405B", {"max_position_embeddings": 131072}),
        (
            "llama3.2_1B",
            {"rotary_scaling_factor": 32, "untie_embeddings_and_output_weights": False, "rotary_base": 5e5},
        ),
        ("qwen2.5_3B", {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False, "norm_epsilon": 1e-6}),
        ("qwen2.5_14B", {"norm_epsilon": 1e-5, "rotary_base": 1e6}),
        ("qwen3_32B", {"qk_layernorm": True, "kv_channels": 128, "add_qkv_bias": False}),
        ("mixtral_8x7B_v0.1", {"moe_router_pre_softmax": False, "rotary_base": 1e6, "max_position_embeddings": 32768}),
        ("qwen3_30B_A3B", {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True}),
        ("deepseek_v2_lite", {"q_lora_rank": None, "mscale": 0.707, "mscale_all_dim": 0.707}),
        ("deepseek_v3", {"moe_router_score_function": "sigmoid", "mscale": 1, "moe_router_topk_scaling_factor": 2.5}),
        (
            "gpt_oss_20B",
            {"rotary_base": 1.5e5, "rotary_scaling_factor": 32, "yarn_correction_range_round_to_int": False},
        ),
    ],
)
def test_what_makes_a_family_differ(name: str, expected: dict[str, object]) -> None:
    spec = load_model(name)
    assert {key: getattr(spec, key) for key in expected} == expected


def test_the_trainer_preset_sets_training_keys_only() -> None:
    tree = yaml.safe_load((PRESETS.parent / "trainers" / "pre_trainer.yaml").read_text())
    assert {"train_iters": 1000, "global_batch_size": 16, "seq_length": 1024, "lr": 2e-5}.items() <= tree.items()
    assert not set(tree) & set(ModelSpec.__struct_fields__), "a trainer preset stands over the model's"
    assert set(tree) & set(TrainingConfig.__struct_fields__)

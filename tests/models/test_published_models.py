"""The model of an experiment against the published one that it names or loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec
from primus.errors import UsageError
from primus.experiment import resolve_settings
from primus.models.model_checks import list_model_differences
from primus.registry import list_plug_ins

EXPERIMENT = "modules: {pre_trainer: {framework: native, model: %s, overrides: {mock_data: true, %s}}}"


def resolve(folder: Path, text: str, *overrides: str) -> tuple[str, ...]:
    """The notes on an experiment that differ from those on other settings."""
    file = folder / "exp.yaml"
    file.write_text(text)
    notes = resolve_settings(file, overrides, {}, absent=[]).notes
    return tuple(note for note in notes if "differs from" in note)


def test_each_preset_equals_the_model_that_it_names() -> None:
    named: dict[str, ModelSpec] = {}
    for name in list_plug_ins("models"):
        spec = load_model(name)
        published = named.setdefault(spec.hf_name, spec)
        assert spec.hf_name == "" or list(list_model_differences(spec, published)) == [], name
    assert len(named) > 40


@pytest.mark.parametrize(
    ("model", "setting", "note"),
    [
        ("mixtral_8x7B", "rotary_base: 10000", "mistralai/Mixtral-8x7B-v0.1: rotary_base 10000.0 (there 1000000.0)"),
        ("qwen3_4B", "qk_layernorm: false", "Qwen/Qwen3-4B: qk_layernorm false (there true)"),
        (
            "llama3.1_70B",
            "rope_type: default, rotary_scaling_factor: 1",
            "meta-llama/Llama-3.1-70B: rope_type default (there llama3)",
        ),
        ("qwen2.5_3B", "num_attention_heads: 32", "Qwen/Qwen2.5-3B: num_attention_heads 32 (there 16), kv_channels 64"),
        ("llama3_8B", "num_layers: 4, max_position_embeddings: 512, seq_length: 512, init_method_std: 0.1", None),
        ("qwen3_30B_A3B", "moe_router_pre_softmax: false, moe_router_norm_topk_prob: false", None),  # the same
    ],
)
def test_a_model_that_differs_from_the_one_that_it_names_gets_a_note(
    model: str, setting: str, note: str | None, tmp_path: Path
) -> None:
    notes = resolve(tmp_path, EXPERIMENT % (f"{model}.yaml", setting))
    assert len(notes) == (note is not None)
    assert all(str(note) in each for each in notes)


def test_a_setting_of_the_command_line_is_meant_to_differ(tmp_path: Path) -> None:
    text = EXPERIMENT % ("llama3_8B.yaml", "load: 'hf:meta-llama/Meta-Llama-3-8B'")
    assert resolve(tmp_path, text, "--rotary_base", "2e6") == ()


def test_weights_of_a_published_model_are_not_loaded_with_a_setting_of_another(tmp_path: Path) -> None:
    text = EXPERIMENT % (
        "llama3_8B.yaml",
        "rotary_base: 70000, finetune: true, load: 'hf:meta-llama/Meta-Llama-3-8B@main'",
    )
    with pytest.raises(UsageError) as caught:
        resolve(tmp_path, text)
    assert (
        "exp.yaml:1: rotary_base: 70000.0, but the model of load: hf:meta-llama/Meta-Llama-3-8B@main has 500000.0"
        in str(caught.value)
    )
    assert "set rotary_base: 500000.0" in caught.value.hint


def test_weights_of_a_folder_are_compared_with_its_config_json(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300,
        "intermediate_size": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 300, ffn_hidden_size: 128"
    shape += ", max_position_embeddings: 4096"
    rest = f"norm_epsilon: %s, untie_embeddings_and_output_weights: false, load: 'hf:{tmp_path}'"
    text = EXPERIMENT % ("tiny.yaml", f"{shape}, num_query_groups: 4, {rest}")
    assert resolve(tmp_path, text % "1e-6") == ()
    with pytest.raises(UsageError, match=r"norm_epsilon: 1\.0e-05, but the model of load"):
        resolve(tmp_path, text % "1e-5")

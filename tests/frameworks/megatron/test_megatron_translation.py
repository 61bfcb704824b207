"""Experiment files of Primus for `framework: megatron`: accepted, translated, refused with the reason."""

from __future__ import annotations

import contextlib
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from primus.config.load import Resolved, load_experiment
from primus.config.schema import OWNERS, ModelSpec, Trainer
from primus.config.source import dump_yaml
from primus.config.translation.pipeline_stages import format_layout
from primus.errors import UsageError
from primus.experiment import CONFIG_FILE, format_files
from primus.frameworks.megatron.support import check as check_megatron

MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
}
EXPERTS = MODEL | {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def write_experiment(
    folder: Path, settings: dict[str, Any], model: dict[str, Any] | None = None, stage: str = "pre_trainer"
) -> Path:
    """An experiment of `settings` over a model preset beside it."""
    (folder / "shape.yaml").write_text(dump_yaml(model or MODEL))
    module = {"framework": "megatron", "config": "pre_trainer.yaml", "model": "shape.yaml"}
    file = folder / "exp.yaml"
    file.write_text(dump_yaml({"modules": {stage: module | {"overrides": {"mock_data": True} | settings}}}))
    return file


def resolve(
    folder: Path, settings: dict[str, Any], model: dict[str, Any] | None = None, stage: str = "pre_trainer"
) -> Resolved:
    return load_experiment(write_experiment(folder, settings, model, stage), environ={})


def read_trainer(folder: Path, settings: dict[str, Any], model: dict[str, Any] | None = None) -> Trainer:
    return resolve(folder, settings, model).experiment.trainer


def read_model(folder: Path, settings: dict[str, Any], model: dict[str, Any] | None = None) -> ModelSpec:
    return read_trainer(folder, settings, model).model


def find_problem(folder: Path, settings: dict[str, Any], model: dict[str, Any] | None = None) -> str:
    with pytest.raises(UsageError) as error:
        resolve(folder, settings, model)
    return str(error.value)


# Presets


def test_the_trainer_preset_of_primus_has_its_meaning(tmp_path: Path) -> None:
    trainer = read_trainer(tmp_path, {})
    assert (trainer.training.micro_batch_size, trainer.training.global_batch_size) == (2, 16)
    assert (trainer.optimizer.lr, trainer.optimizer.weight_decay, trainer.optimizer.adam_beta2) == (2e-5, 0.0, 0.999)


def test_presets_of_the_checkout_that_holds_the_experiment_are_read(tmp_path: Path) -> None:
    presets = tmp_path / "primus/configs"
    for folder, text in {
        "modules/megatron/pre_trainer.yaml": "extends: [base.yaml]\ntrain_iters: 7\n",
        "modules/megatron/base.yaml": "lr: 0.5\nsink_level: null\n",
        "models/megatron/llama3.1_8B.yaml": f"bases: [shape.yaml]\n{dump_yaml({'num_layers': 3})}",
        "models/megatron/shape.yaml": dump_yaml(MODEL | {"vocab_size": None}),
    }.items():
        file = presets / folder
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    experiment = tmp_path / "examples/megatron/configs/MI300X/exp.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(
        textwrap.dedent("""\
            modules:
              pre_trainer:
                framework: megatron
                config: pre_trainer.yaml
                model: llama3.1_8B.yaml
                overrides: {mock_data: true}
            """)
    )
    resolved = load_experiment(experiment, environ={})
    trainer = resolved.experiment.trainer
    assert (trainer.training.train_iters, trainer.optimizer.lr, trainer.model.num_layers) == (7, 0.5, 3)
    assert resolved.origins["num_layers"].endswith("primus/configs/models/megatron/llama3.1_8B.yaml:2")
    assert (trainer.model.vocab_size, trainer.model.hf_name) == (128256, "meta-llama/Llama-3.1-8B")


def test_unknown_keys_of_presets_in_a_checkout_are_listed_if_they_are_on(tmp_path: Path) -> None:
    preset = tmp_path / "primus/configs/modules/megatron/pre_trainer.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text(
        "use_warp_drive: false\nwarp_factor: 9\nwarp_cores: null\nuse_turbo_parallel_linear: true\nlr: 0.5\n"
    )
    file = tmp_path / "examples/megatron/exp.yaml"
    file.parent.mkdir(parents=True)
    (file.parent / "shape.yaml").write_text(dump_yaml(MODEL))
    module = {"framework": "megatron", "config": "pre_trainer.yaml", "model": "shape.yaml"}
    file.write_text(dump_yaml({"modules": {"pre_trainer": module | {"overrides": {"mock_data": True}}}}))
    resolved = load_experiment(file, environ={})
    assert resolved.experiment.trainer.optimizer.lr == 0.5
    assert "unknown settings of Primus' presets, not applied: warp_factor 9" in resolved.notes
    written = {"mock_data": True, "use_warp_drive": False}
    file.write_text(dump_yaml({"modules": {"pre_trainer": module | {"overrides": written}}}))
    with pytest.raises(UsageError, match=r"exp.yaml:\d+: unknown key 'use_warp_drive'"):
        load_experiment(file, environ={})


def test_without_a_checkout_the_preset_of_the_same_name_is_used(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {})
    file.write_text(file.read_text().replace("shape.yaml", "deepseek_v3.yaml"))
    assert load_experiment(file, environ={}).experiment.trainer.model.num_experts == 256


# Keys


def test_an_argument_without_an_equivalent_key_reaches_the_engine_with_its_origin(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"overlap_grad_reduce": True, "ckpt_format": "torch"})
    assert resolved.experiment.trainer.backend_args["overlap_grad_reduce"] is True
    assert resolved.origins["backend_args.ckpt_format"].startswith(f"{tmp_path}/exp.yaml:")


def test_a_variable_among_the_settings_is_a_note_and_an_argument_in_capitals_an_error(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"GPU_MAX_HW_QUEUES": 4})
    assert "not set, as in Primus: GPU_MAX_HW_QUEUES; variables belong under env:" in resolved.notes
    assert "unknown key 'TRAIN_ITERS'" in find_problem(tmp_path, {"TRAIN_ITERS": 4})


def test_a_renamed_argument_sets_the_equivalent_key_and_shows_its_name(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"layernorm_epsilon": 3e-6}, MODEL | {"norm_epsilon": 1e-5})
    assert resolved.experiment.trainer.model.norm_epsilon == 3e-6
    assert resolved.origins["norm_epsilon"].endswith("(layernorm_epsilon)")


def test_a_misspelt_argument_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    assert "unknown key 'overlap_grad_reduc'; did you mean 'overlap_grad_reduce'?" in find_problem(
        tmp_path, {"overlap_grad_reduc": True}
    )


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("ddp_bucket_size", "many", "expected int"),
        ("overlap_grad_reduce", 3, "expected bool"),
        ("ckpt_format", "zip", "'zip' is not possible; valid: torch, torch_dist"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_with_its_line(
    tmp_path: Path, key: str, value: Any, problem: str
) -> None:
    assert f"exp.yaml:8: {key}: {problem}" in find_problem(tmp_path, {key: value})


def test_keys_of_primus_without_effect_are_one_note(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"stderr_sink_level": "DEBUG", "log_avg_skip_iterations": 5, "use_turbo_gemm": True})
    (note,) = resolved.notes
    assert "log_avg_skip_iterations, stderr_sink_level (reports only)" in note
    assert "use_turbo_gemm (speed or memory only)" in note


def test_arguments_of_other_optimizers_do_not_keep_megatron_core_from_training(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"muon_momentum": 0.95, "sgd_momentum": 0.8, "device": "cpu"})
    check_megatron(resolved.experiment)
    assert "muon_momentum, sgd_momentum (other tasks or optimizers only)" in resolved.notes[0]


def test_keys_of_primus_at_their_defaults_are_not_mentioned(tmp_path: Path) -> None:
    assert resolve(tmp_path, {"use_turbo_gemm": False, "stderr_sink_level": "INFO"}).notes == ()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weight_deosc": True}, "weight de-oscillation is Primus' own"),
        ({"lora": {"enabled": True, "dim": 8}}, "low-rank adaptation is Primus' own"),
        ({"rampup_batch_size": [16, 16, 1000]}, "the global batch size is constant here"),
        ({"train_samples": 4096}, "use train_iters"),
        ({"perform_rl_step": True}, "no engine here does this task"),
        ({"normalization": "LayerNorm"}, "models here have RMSNorm"),
        ({"position_embedding_type": "learned_absolute"}, "rotary embedding"),
        ({"swiglu": False}, "gated feed-forward layers"),
    ],
)
def test_what_would_change_the_training_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    (key,) = settings
    problem = find_problem(tmp_path, settings)
    line = 9 if isinstance(settings[key], dict | list) else 8  # a nested value names its own line
    assert f"exp.yaml:{line}: {key}: " in problem
    assert reason in problem


def test_a_trainer_of_primus_for_images_is_refused(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {})
    file.write_text(
        file.read_text().replace("framework: megatron", "framework: megatron\n    trainer_class: FluxTrainer")
    )
    with pytest.raises(UsageError, match="trainer_class: FluxTrainer is Primus' own"):
        load_experiment(file, environ={})


def test_a_module_of_fine_tuning_reads_instruction_data(tmp_path: Path) -> None:
    given = {"sft_dataset_name": "a/b", "mock_data": False, "enable_packed_sequences": True}
    trainer = resolve(tmp_path, given, stage="post_trainer").experiment.trainer
    assert (trainer.data.sft_data_path, trainer.data.packed_sequence) == ("hf:a/b", True)


def test_the_command_line_accepts_arguments_of_megatron(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {"overlap_grad_reduce": True})
    words = ["--no_overlap_grad_reduce", "--overlap_param_gather", "--recompute-granularity", "full", "--lr", "1e-3"]
    with pytest.raises(UsageError, match="no_overlap_grad_reduce"):
        load_experiment(file, words, environ={})
    trainer = load_experiment(file, words[1:], environ={}).experiment.trainer
    assert trainer.backend_args["overlap_param_gather"] is True
    assert (trainer.backend_args["recompute_granularity"], trainer.optimizer.lr) == ("full", 1e-3)


STRANGE = [{"a": 1}, [1, 2], [], {}, "x", "", True, -1, 1e30, None, [[1]], "([0]*3", [None], {"enable": [1]}]
"""Values of the wrong kind for most keys."""


@pytest.mark.parametrize("value", STRANGE, ids=str)
def test_any_value_of_a_translated_key_is_accepted_or_an_error_of_the_user(tmp_path: Path, value: Any) -> None:
    keys = """
        window_size window_attn_skip_freq moe_layer_freq rotary_scaling_factor use_rope_scaling rope_type data_path
        tokenizer_type tokenizer_model sequence_parallel tensor_model_parallel_size softmax_type fim_data torch_compile
        train_samples rampup_batch_size num_experts hidden_size ffn_hidden_size vocab_size hidden_dropout model_type
        group_query_attention use_sink_attention sink_sliding_window pretrained_checkpoint lora spec swiglu hf_path
    """.split()
    for key in keys:
        with contextlib.suppress(UsageError):
            resolve(tmp_path, {key: value}, EXPERTS | {"multi_latent_attention": True})


def test_a_quoted_variable_may_hold_a_switch_or_a_number(tmp_path: Path) -> None:
    settings = {"use_rope_scaling": '"${A}"', "rope_scaling_factor": '"${B}"', "overlap_grad_reduce": '"${A}"'}
    file = write_experiment(tmp_path, settings)
    file.write_text(file.read_text().replace("'\"", '"').replace("\"'", '"'))
    trainer = load_experiment(file, environ={"A": "true", "B": "4"}).experiment.trainer
    assert (trainer.model.rope_type, trainer.model.rotary_scaling_factor) == ("llama3", 4.0)
    assert trainer.backend_args["overlap_grad_reduce"] is True


# Engines


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_the_framework_of_the_command_line_changes_only_the_engine(tmp_path: Path, framework: str) -> None:
    file = tmp_path / "exp.yaml"
    module = {"framework": "native", "config": "pre_trainer.yaml", "model": "tiny", "overrides": {"mock_data": True}}
    file.write_text(dump_yaml({"modules": {"pre_trainer": module}}))
    native = load_experiment(file, environ={}).experiment.trainer
    other = load_experiment(file, ["--framework", framework], environ={}).experiment.trainer
    assert structs.replace(other, framework="native") == native


def test_the_engine_of_the_command_line_takes_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    file.write_text(dump_yaml({"modules": {"pre_trainer": {"model": "tiny", "overrides": {"mock_data": True}}}}))
    words = ["--framework", "megatron", "--overlap_grad_reduce", "--layernorm_epsilon", "1e-3"]
    trainer = load_experiment(file, words, environ={}).experiment.trainer
    assert (trainer.backend_args, trainer.model.norm_epsilon) == ({"overlap_grad_reduce": True}, 1e-3)


def test_another_engine_trains_a_file_for_megatron_without_its_own_settings(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {"overlap_grad_reduce": True, "backend_args": {"mine": 1}})
    resolved = load_experiment(file, ["--framework", "native"], environ={})
    assert resolved.experiment.trainer.backend_args == {"mine": 1}
    assert resolved.experiment.trainer.optimizer.adam_beta2 == 0.999
    assert "settings of megatron alone, not applied: dataloader_type, overlap_grad_reduce" in resolved.notes[-1]


def test_a_run_folder_is_read_as_it_was_resolved(tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    scores = {"moe_router_score_function": "sigmoid", "moe_router_norm_topk_prob": False}
    (tmp_path / "shape.yaml").write_text(
        dump_yaml({key: value for key, value in EXPERTS.items() if key in OWNERS} | scores)
    )
    module = {"framework": "native", "model": "shape.yaml", "overrides": {"mock_data": True}}
    file.write_text(dump_yaml({"modules": {"pre_trainer": module}}))
    resolved = load_experiment(file, ["--framework", "megatron"], environ={})
    for name, text in format_files(resolved).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    again = load_experiment(tmp_path / CONFIG_FILE, environ=None, is_resolved=True)
    assert again.experiment == resolved.experiment


# Data


@pytest.mark.parametrize(
    ("settings", "train", "folder"),
    [
        ({"data_path": "0.3 a 0.7 b"}, "0.3 a 0.7 b", "./data"),
        ({"data_path": ["0.3", "a", "0.7", "b"]}, ["0.3", "a", "0.7", "b"], "./data"),
        ({"data_path": "corpus_text_document"}, "corpus_text_document", "./data"),
        ({"data_path": "./data", "dataset": "d"}, None, "./data"),
        ({"data_path": "folder/", "train_data_path": "p"}, "p", "folder/"),
        ({"data_path": None, "train_data_path": "p"}, "p", "./data"),
    ],
)
def test_data_path_is_a_blend_unless_other_data_are_named(
    tmp_path: Path, settings: dict[str, Any], train: Any, folder: str
) -> None:
    data = read_trainer(tmp_path, {"mock_data": False, **settings}).data
    assert (data.train_data_path, data.data_path) == (train, folder)


def test_native_keeps_data_path_as_a_folder(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {"data_path": "x", "mock_data": False, "dataset": "d"})
    words = ["--framework", "native", "--config", "null", "--model", "tiny"]
    assert load_experiment(file, words, environ={}).experiment.trainer.data.data_path == "x"


# Models


@pytest.mark.parametrize(
    ("written", "dense", "frequency"),
    [
        ("([0]*1+[1]*3)", 1, 1),
        ([0, 0, 1, 1], 2, 1),
        ("([0,1]*2)", 0, 2),
        ("1", 0, 1),
        (1, 0, 1),
    ],
)
def test_layers_with_experts_are_read_from_a_pattern(tmp_path: Path, written: Any, dense: int, frequency: int) -> None:
    spec = read_model(tmp_path, {"moe_layer_freq": written}, EXPERTS)
    assert (spec.first_k_dense_replace, spec.moe_layer_freq) == (dense, frequency)


@pytest.mark.parametrize("written", ["__import__('os')", "[1]*10**9", "([1,0]*2)", "([0]*2+[2]*2)", "[[1]]"])
def test_a_pattern_that_is_no_list_of_layers_is_an_error(tmp_path: Path, written: str) -> None:
    assert "moe_layer_freq" in find_problem(tmp_path, {"moe_layer_freq": written}, EXPERTS)


def test_llama_rope_scaling_is_translated(tmp_path: Path) -> None:
    spec = read_model(tmp_path, {"use_rope_scaling": True, "rope_scaling_factor": 16.0, "rotary_scaling_factor": 40})
    assert (spec.rope_type, spec.rotary_scaling_factor) == ("llama3", 16.0)


def test_latent_attention_takes_yarn_and_the_widths_of_megatron(tmp_path: Path) -> None:
    spec = read_model(tmp_path, {"multi_latent_attention": True, "rotary_scaling_factor": 40, "kv_lora_rank": 64})
    assert (spec.rope_type, spec.rotary_scaling_factor, spec.original_max_position_embeddings) == ("yarn", 40, 4096)
    assert (spec.kv_lora_rank, spec.qk_head_dim, spec.v_head_dim) == (64, 128, 128)


def test_a_scaling_factor_without_scaling_has_no_effect(tmp_path: Path) -> None:
    assert read_model(tmp_path, {"rotary_scaling_factor": 40}).rotary_scaling_factor == 1.0


def test_groups_of_queries_need_the_switch(tmp_path: Path) -> None:
    assert read_model(tmp_path, {"group_query_attention": False, "num_query_groups": 2}).num_query_groups is None
    assert read_model(tmp_path, {"group_query_attention": True, "num_query_groups": 2}).num_query_groups == 2


def test_sequence_parallelism_of_one_device_is_off(tmp_path: Path) -> None:
    assert read_trainer(tmp_path, {"sequence_parallel": True}).parallel.sequence_parallel is False
    parallel = read_trainer(tmp_path, {"sequence_parallel": True, "tensor_model_parallel_size": 2}).parallel
    assert parallel.sequence_parallel is True


@pytest.mark.parametrize(
    ("settings", "window", "period"),
    [
        ({"window_size": [127, 0], "window_attn_skip_freq": 2}, 128, 2),
        ({"window_size": "(127, 0)", "window_attn_skip_freq": [1, 0, 1, 0]}, 128, 2),
        ({"window_size": 128}, 128, 1),
        ({"use_sink_attention": True, "sink_sliding_window": 128}, 128, 2),
    ],
)
def test_a_sliding_window_is_translated(tmp_path: Path, settings: dict[str, Any], window: int, period: int) -> None:
    spec = read_model(tmp_path, settings)
    assert (spec.window_size, spec.window_layer_period) == (window, period)


def test_the_vocabulary_follows_a_published_tokenizer(tmp_path: Path) -> None:
    preset = MODEL | {"vocab_size": None}
    settings = {"tokenizer_model": "Qwen/Qwen2.5-7B", "tokenizer_type": "HuggingFaceTokenizer"}
    assert read_model(tmp_path, settings, preset).vocab_size == 152064
    assert read_model(tmp_path, {**settings, "vocab_size": 600}, preset).vocab_size == 600
    assert "lacks 'vocab_size'" in find_problem(tmp_path, {"tokenizer_model": "an/unknown"}, preset)


def test_a_dense_model_ignores_settings_of_experts(tmp_path: Path) -> None:
    spec = read_model(tmp_path, {"num_experts": None, "moe_router_topk": 8, "moe_layer_freq": "([0]*1+[1]*3)"})
    assert (spec.num_experts, spec.first_k_dense_replace) == (None, 0)


# Pipeline stages


def test_layers_that_the_stages_do_not_divide_are_placed_evenly_with_a_note(tmp_path: Path) -> None:
    model = MODEL | {"num_layers": 7}
    resolved = resolve(tmp_path, {"pipeline_model_parallel_size": 2}, model)
    assert resolved.experiment.trainer.backend_args["pipeline_model_parallel_layout"] == "Et*4|t*3L"
    assert any("pipeline_model_parallel_size 2 does not divide num_layers 7" in note for note in resolved.notes)


@pytest.mark.parametrize(
    "settings",
    [{"decoder_last_pipeline_num_layers": 3}, {"pipeline_model_parallel_layout": "Ettttt|ttL"}],
)
def test_stages_that_the_file_places_stay_as_they_are(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = read_trainer(tmp_path, {"pipeline_model_parallel_size": 2} | settings, MODEL | {"num_layers": 7})
    assert {key: value for key, value in found.backend_args.items() if "pipeline" in key} == settings


def test_layers_that_the_stages_divide_have_no_layout(tmp_path: Path) -> None:
    found = read_trainer(tmp_path, {"pipeline_model_parallel_size": 2}).backend_args
    assert "pipeline_model_parallel_layout" not in found


def test_embedding_and_head_count_as_a_layer_each() -> None:
    assert format_layout(126, 8) == "|".join(["Et*15", *["t*16"] * 6, "t*15L"])  # the layers of Llama 3.1 405B


@given(num_stages=st.integers(2, 20), more=st.integers(0, 100), predicted=st.integers(0, 3))
def test_a_layout_has_every_layer_once_and_a_layer_on_every_stage(num_stages: int, more: int, predicted: int) -> None:
    layers = num_stages + more
    stages = re.sub(r"t\*(\d+)", lambda found: "t" * int(found[1]), format_layout(layers, num_stages, predicted))
    counts = [stage.count("t") for stage in stages.split("|")]
    assert len(counts) == num_stages and sum(counts) == layers and min(counts) >= 1
    assert stages.startswith("E") and stages.endswith("m" * predicted + "L")
    assert max(counts) - min(counts) <= predicted + 2


def test_a_key_of_the_command_line_wins_over_megatrons_own_words_for_it(tmp_path: Path) -> None:
    file = write_experiment(
        tmp_path, {"use_rope_scaling": True, "rope_scaling_factor": 4.0, "use_sink_attention": True}
    )
    words = ["--rope_type", "default", "--attention_sinks", "false"]
    model = load_experiment(file, words, environ={}).experiment.trainer.model
    assert model.rope_type == "default" and model.attention_sinks is False
    unchanged = load_experiment(file, environ={}).experiment.trainer.model
    assert unchanged.rope_type == "llama3" and unchanged.attention_sinks is True


def test_fine_tuning_in_a_module_of_pretraining_is_fine_tuning(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    text = "modules: {pre_trainer: {framework: megatron, model: tiny.yaml, overrides: {stage: %s, sft_data_path: a}}}\n"
    file.write_text(text % "sft")
    found = load_experiment(file, environ={})
    assert found.experiment.stage == "post_trainer"
    assert any("those of fine-tuning" in note for note in found.notes)
    assert "stage" not in found.experiment.trainer.backend_args
    file.write_text(text % "pretrain")
    assert load_experiment(file, environ={}).experiment.stage == "pre_trainer"


def test_turbo_keys_of_earlier_releases_of_primus_are_known(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    text = "modules: {pre_trainer: {framework: megatron, model: tiny.yaml, overrides: {mock_data: true, %s}}}\n"
    file.write_text(text % "use_turbo_row_parallel_linear: true")
    assert any("use_turbo_row_parallel_linear (speed" in note for note in load_experiment(file, environ={}).notes)
    file.write_text(text % "enable_turbo_gemm_float8: true")
    with pytest.raises(UsageError, match="enable_turbo_gemm_float8"):
        load_experiment(file, environ={})

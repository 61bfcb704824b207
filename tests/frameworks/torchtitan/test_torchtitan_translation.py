"""Experiment files of Primus for `framework: torchtitan`: the tree of 0.2 and 0.3 in the words of the schema."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from primus.config.load import Resolved, load_experiment
from primus.config.schema import Trainer
from primus.config.source import dump_yaml
from primus.errors import UsageError
from primus.frameworks.torchtitan.names import read_fields
from primus.frameworks.torchtitan.translation import RENAMED


def write_experiment(folder: Path, settings: dict[str, Any], model: str = "llama3.1_8B.yaml") -> Path:
    module = {"framework": "torchtitan", "config": "pre_trainer.yaml", "model": model, "overrides": settings}
    file = folder / "exp.yaml"
    file.write_text(dump_yaml({"modules": {"pre_trainer": module}}))
    return file


def resolve(folder: Path, settings: dict[str, Any], *words: str, model: str = "llama3.1_8B.yaml") -> Resolved:
    return load_experiment(write_experiment(folder, settings, model), words, environ={})


def read_trainer(folder: Path, settings: dict[str, Any], *words: str) -> Trainer:
    return resolve(folder, settings, *words).experiment.trainer


def find_problem(folder: Path, settings: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as error:
        resolve(folder, settings)
    return str(error.value)


def test_the_trainer_preset_of_primus_has_its_meaning(tmp_path: Path) -> None:
    trainer = read_trainer(tmp_path, {})
    assert (trainer.training.train_iters, trainer.training.micro_batch_size) == (10000, 8)
    assert (trainer.optimizer.lr, trainer.optimizer.lr_warmup_iters, trainer.data.mock_data) == (8e-4, 200, True)
    assert trainer.checkpoint.disable_last_saving


def test_a_field_sets_the_equivalent_key_and_shows_its_name(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"training": {"steps": 300, "seq_len": 512}, "optimizer": {"lr": 1e-3}})
    assert resolved.experiment.trainer.training.seq_length == 512
    assert resolved.origins["train_iters"].endswith("exp.yaml:8 (training.steps)")
    assert resolved.origins["lr"].endswith("(optimizer.lr)")


@pytest.mark.parametrize("words", [("--training.steps", "7"), ("--train_iters", "7"), ("training.steps=7",)])
def test_the_command_line_takes_both_names(tmp_path: Path, words: tuple[str, ...]) -> None:
    settings = {"training": {"steps": 300}, "lr_scheduler": {"warmup_steps": 2}}
    assert read_trainer(tmp_path, settings, *words).training.train_iters == 7


def test_names_of_release_0_3_mean_the_same_as_those_of_0_2(tmp_path: Path) -> None:
    settings = {"validator": {"enable": True, "freq": 5, "steps": 3}, "profiler": {"enable_profiling": True}}
    trainer = read_trainer(tmp_path, settings)
    assert (trainer.training.eval_interval, trainer.training.eval_iters, trainer.logging.profile) == (5, 3, True)


def test_a_misspelt_field_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    problem = find_problem(tmp_path, {"training": {"stepps": 3}})
    assert "exp.yaml:8: unknown key 'training.stepps'" in problem


def test_a_field_without_an_equivalent_key_reaches_the_engine_at_its_place_in_0_3(tmp_path: Path) -> None:
    settings = {
        "training": {"gc_freq": 7},
        "parallelism": {"enable_async_tensor_parallel": True, "fsdp_reshard_after_forward": "never"},
        "activation_checkpoint": {"mode": "selective"},
    }
    assert read_trainer(tmp_path, settings).backend_args == {
        "activation_checkpoint": {"mode": "selective"},
        "training": {"gc_freq": 7},
        "compile": {"enable_async_tensor_parallel": True},
        "parallelism": {"fsdp_reshard_after_forward": "never"},
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimizer": {"early_step_in_backward": True}}, "no optimizer step in the backward pass"),
        ({"optimizer": {"name": "Adam"}}, "only AdamW is supported"),
        ({"primus_turbo": {"enable_attention_float8": True}}, "primus_turbo.enable_attention_float8: "),
        ({"lr_scheduler": {"decay_type": "sqrt", "warmup_steps": 1}}, "use linear or cosine"),
        ({"model": {"flavor": "70B"}}, "write model: llama3.1_70B.yaml in the module"),
        ({"model": {"converters": ["quantize.linear.mx"]}}, "quantize.linear.mx: not supported"),
        ({"training": {"mock_data": False, "dataset_path": "/x"}}, "prepare it by `data prepare`"),
        ({"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 1}}, "global_batch_size"),
    ],
)
def test_what_would_change_the_training_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    assert reason in find_problem(tmp_path, settings)


@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], [], "x", "", True, -1, None, [[1]], [None]], ids=str)
def test_any_value_of_a_field_is_accepted_or_an_error_of_the_user(tmp_path: Path, value: Any) -> None:
    for key in (*RENAMED, *read_fields().keys):
        section, _, name = key.partition(".")
        with contextlib.suppress(UsageError):
            resolve(tmp_path, {section: {name: value}} if name else {section: value})


def test_fields_without_effect_are_one_note(tmp_path: Path) -> None:
    settings = {"metrics": {"save_tb_folder": "x"}, "primus_turbo": {"enable_primus_turbo": True}}
    (note,) = resolve(tmp_path, settings).notes
    assert "metrics.save_tb_folder (reports only)" in note
    assert "primus_turbo.enable_primus_turbo (speed or memory only)" in note


@pytest.mark.parametrize(
    ("schedule", "style", "decay"),
    [
        ({"warmup_steps": 10}, "linear", None),
        ({"warmup_steps": 10, "decay_type": "cosine"}, "cosine", None),
        ({"warmup_steps": 10, "decay_ratio": 0.2}, "WSD", 20),
        ({"warmup_steps": 30, "decay_ratio": 0.8, "decay_type": "cosine"}, "cosine", None),
        ({"warmup_steps": 500}, "constant", None),
    ],
)
def test_the_schedule_is_translated(tmp_path: Path, schedule: dict[str, Any], style: str, decay: int | None) -> None:
    optimizer = read_trainer(tmp_path, {"training": {"steps": 100}, "lr_scheduler": schedule}).optimizer
    assert (optimizer.lr_decay_style, optimizer.lr_wsd_decay_iters) == (style, decay)
    assert optimizer.lr_warmup_iters == min(schedule["warmup_steps"], 100)


def test_a_named_dataset_takes_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    data = read_trainer(tmp_path, {"training": {"mock_data": False}}).data
    assert (data.dataset, data.tokenizer_model) == ("c4", "meta-llama/Llama-3.1-8B")


def test_data_of_the_schema_replace_the_named_dataset(tmp_path: Path) -> None:
    data = read_trainer(tmp_path, {}, "--train_data_path", "p").data
    assert (data.train_data_path, data.dataset, data.mock_data) == ("p", None, False)


def test_layout_and_recomputation_are_translated(tmp_path: Path) -> None:
    settings = {
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
        "activation_checkpoint": {"mode": "full"},
    }
    trainer = read_trainer(tmp_path, settings)
    assert (trainer.parallel.tensor_model_parallel_size, trainer.parallel.sequence_parallel) == (2, True)
    assert (trainer.parallel.use_distributed_optimizer, trainer.training.recompute_activations) == (False, True)


def test_checkpoints_are_translated(tmp_path: Path) -> None:
    settings = {"checkpoint": {"enable": True, "interval": 25, "keep_latest_k": 3, "async_mode": "async"}}
    checkpoint = read_trainer(tmp_path, settings).checkpoint
    assert (checkpoint.save_interval, checkpoint.keep_last_n, checkpoint.async_save) == (25, 3, True)
    assert checkpoint.auto_continue_train
    assert not checkpoint.disable_last_saving


def test_a_key_of_the_command_line_wins_over_the_files_own_words_for_it(tmp_path: Path) -> None:
    settings = {
        "training": {"mixed_precision_param": "bfloat16", "global_batch_size": 32},
        "model": {"converters": ["quantize.linear.float8"]},
        "activation_checkpoint": {"mode": "full"},
        "checkpoint": {"enable": True, "interval": 10},
    }
    file = write_experiment(tmp_path, settings)
    words = ["--fp8", "null", "--bf16", "false", "--global_batch_size", "8", "--recompute_activations", "false"]
    trainer = load_experiment(file, [*words, "--save_interval", "7"], environ={}).experiment.trainer
    training = trainer.training
    assert (training.fp8, training.bf16, training.global_batch_size) == (None, False, 8)
    assert training.recompute_activations is False and trainer.checkpoint.save_interval == 7
    unchanged = load_experiment(file, environ={}).experiment.trainer.training
    assert (unchanged.fp8, unchanged.bf16, unchanged.global_batch_size) == ("e4m3", True, 32)

"""Experiment files of Primus for `framework: maxtext`: MaxText's settings in the words of the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primus.config.extended_files import load_model
from primus.config.load import Resolved
from primus.config.schema import OWNERS, OptimizerConfig
from primus.config.source import dump_yaml
from primus.engine_keys import write_keys
from primus.errors import UsageError
from primus.experiment import resolve_experiment
from primus.frameworks.maxtext.names import DEFAULTS, FOLDER, MODELS, RENAMED, SHAPE, read_settings
from primus.models.model_checks import list_model_differences

SYNTHETIC = {
    "run_name": "a_training",
    "steps": 50,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "ici_fsdp_parallelism": 8,
    "max_target_length": 4096,
    "per_device_batch_size": 3,
}
LLAMA = {"model_name": "llama3-8b", "tokenizer_path": "meta-llama/Meta-Llama-3-8B", "attention": "cudnn_flash_te"}


def write_experiment(folder: Path, settings: dict[str, Any], model: dict[str, Any]) -> Path:
    (folder / "a_model.yaml").write_text(dump_yaml(model))
    module = {"framework": "maxtext", "config": "pre_trainer.yaml", "model": "a_model.yaml", "overrides": settings}
    file = folder / "exp.yaml"
    file.write_text(dump_yaml({"modules": {"pre_trainer": module}}))
    return file


def resolve(folder: Path, *words: str, model: dict[str, Any] | None = None, **settings: Any) -> Resolved:
    file = write_experiment(folder, SYNTHETIC | settings, LLAMA if model is None else model)
    return resolve_experiment(file, words, {})


def find_problem(folder: Path, **settings: Any) -> str:
    with pytest.raises(UsageError) as error:
        resolve(folder, **settings)
    return f"{error.value} {error.value.hint}"


def test_an_experiment_of_primus_keeps_its_meaning_and_the_defaults_of_maxtext(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, remat_policy="minimal_flash", quantization="fp8")
    trainer = resolved.experiment.trainer
    training, optimizer = trainer.training, trainer.optimizer
    assert trainer.model == load_model("llama3_8B")
    assert (training.train_iters, training.micro_batch_size, training.seq_length) == (50, 3, 4096)
    assert (training.bf16, training.recompute_activations, training.init) == (True, False, "primus")
    # base.yml: learning_rate, warmup_steps_fraction, learning_rate_final_fraction
    assert (optimizer.lr, optimizer.lr_warmup_fraction, optimizer.min_lr_ratio) == (3e-5, 0.1, 0.1)
    assert trainer.data.mock_data and trainer.checkpoint.disable_last_saving
    assert trainer.backend_args == {
        "model_name": "llama3-8b",
        "attention": "cudnn_flash_te",
        "remat_policy": "minimal_flash",
        "quantization": "fp8",
        "weight_dtype": "bfloat16",
        "ici_fsdp_parallelism": 8,
    }
    assert resolved.origins["train_iters"].endswith("(steps)")
    assert resolved.notes == ("no effect here: run_name (reports only)",)


def test_the_command_line_takes_the_names_of_maxtext_and_of_primus(tmp_path: Path) -> None:
    trainer = resolve(tmp_path, "--steps", "7", "--seq_length", "512", "--remat_policy", "minimal").experiment.trainer
    assert (trainer.training.train_iters, trainer.training.seq_length) == (7, 512)
    assert trainer.backend_args["remat_policy"] == "minimal"


def test_keys_of_primus_in_such_a_file_keep_their_values(tmp_path: Path) -> None:
    own = {"bf16": False, "recompute_activations": False, "lr_warmup_iters": 5, "save_interval": 7}
    module = {"framework": "maxtext", "model": "llama3.2_1B", "overrides": {"mock_data": True, "seq_length": 64, **own}}
    file = tmp_path / "exp.yaml"
    file.write_text(dump_yaml({"modules": {"pre_trainer": module}}))
    with pytest.raises(UsageError, match="constants of Llama"):
        resolve_experiment(file, (), {})
    trainer = resolve_experiment(file, ("--rotary_scaling_factor", "8"), {}).experiment.trainer
    assert not trainer.model.untie_embeddings_and_output_weights and trainer.model.rope_type == "llama3"
    assert (trainer.training.bf16, trainer.training.recompute_activations) == (False, False)
    assert (trainer.optimizer.lr_warmup_iters, trainer.optimizer.lr_warmup_fraction) == (5, None)
    assert (trainer.checkpoint.save_interval, trainer.checkpoint.auto_continue_train) == (7, False)


def test_a_model_without_a_name_is_what_its_settings_say(tmp_path: Path) -> None:
    shape = {
        "decoder_block": "mixtral",
        "base_emb_dim": 64,
        "base_num_query_heads": 4,
        "base_num_kv_heads": 2,
        "base_mlp_dim": 96,
        "base_moe_mlp_dim": 96,
        "base_num_decoder_layers": 2,
        "vocab_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    resolved = resolve(tmp_path, model=shape)
    spec = resolved.experiment.trainer.model
    assert (spec.hidden_size, spec.num_experts, spec.moe_router_topk) == (64, 4, 2)
    assert resolved.experiment.trainer.training.init == "engine"
    assert "init: engine: MaxText draws the initial weights of this model" in resolved.notes


def test_tensor_parallel_devices_share_the_sequences_that_maxtext_counts_for_each(tmp_path: Path) -> None:
    trainer = resolve(tmp_path, ici_tensor_parallelism=4, ici_fsdp_parallelism=2).experiment.trainer
    assert (trainer.parallel.tensor_model_parallel_size, trainer.training.micro_batch_size) == (4, 12)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ici_fsdp_paralelism": 8}, "ici_fsdp_parallelism"),
        ({"gradient_accumulation_steps": 4}, "set global_batch_size to per_device_batch_size x devices x 4"),
        ({"dataset_type": "tfds"}, "prepare the data by `data prepare`"),
        ({"opt_type": "muon"}, "only AdamW is supported"),
        ({"load_parameters_path": "gs://a/b"}, "maxtext.checkpoint_conversion.to_huggingface"),
        ({"per_device_batch_size": 0.5}, "less than a sequence"),
        ({"ici_pipeline_parallelism": 2}, "MaxText does not support pipeline parallelism"),
        ({"init_weights_seed": 1, "weight_decay_x": 2}, "weight_decay"),
    ],
)
def test_what_is_not_possible_names_the_key_and_the_way_out(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    assert said in find_problem(tmp_path, **settings)


def test_a_named_model_stands_over_presets_that_copy_base_yml(tmp_path: Path) -> None:
    copy = {
        "base_emb_dim": 2048, "base_num_decoder_layers": 16, "base_mlp_dim": 7168, "kv_lora_rank": 512,
        "rope_factor": 40, "rope_type": "default", "num_experts": 1, "num_experts_per_tok": 1, "shared_experts": 1,
        "logits_via_embedding": True, "override_model_config": True, "attention_type": "global",
    }  # fmt: skip
    for name, preset in (("mixtral-8x7b", "mixtral_8x7B"), ("deepseek2-16b", "deepseek_v2_lite")):
        spec = resolve(tmp_path, model=copy | {"model_name": name}).experiment.trainer.model
        published = load_model(preset)
        assert list(list_model_differences(spec, published)) == []
        assert spec.num_layers == published.num_layers
    written = resolve(tmp_path, model=copy | {"model_name": "llama2-7b"}, base_emb_dim=1024)
    assert written.experiment.trainer.model.hidden_size == 1024


def test_an_unknown_model_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        resolve(tmp_path, model=LLAMA | {"model_name": "llama3-8bb"})
    assert "llama3-8b" in error.value.hint


def test_every_renamed_setting_is_one_of_maxtext_and_of_the_schema() -> None:
    names = write_keys(FOLDER, OptimizerConfig(), "min_lr_ratio")
    assert names.keys() == {"learning_rate_final_fraction"}
    of_earlier_releases = {"cosine_learning_rate_final_fraction"}
    assert {*RENAMED, *DEFAULTS, *SHAPE} - of_earlier_releases <= read_settings().keys.keys()
    assert set(RENAMED.values()) <= OWNERS.keys()
    assert all(load_model(preset).hidden_size for preset in MODELS.values())

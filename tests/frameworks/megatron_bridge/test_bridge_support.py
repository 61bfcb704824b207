"""`framework: megatron_bridge` on the control plane: accepted, refused and translated experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from primus.config.load import Resolved
from primus.errors import UsageError
from primus.experiment import resolve_experiment

LORA = {"peft": "lora", "mock_data": True, "load": None}


def resolve(
    tmp_path: Path,
    overrides: dict[str, Any],
    *words: str,
    model: str = "qwen3_8B.yaml",
    stage: str = "post_trainer",
    framework: str = "megatron_bridge",
    top: dict[str, Any] | None = None,
) -> Resolved:
    config = "sft_trainer.yaml" if stage == "post_trainer" else "pretrain_trainer.yaml"
    module = {"framework": framework, "config": config, "model": model, "overrides": overrides}
    file = tmp_path / "exp.yaml"
    file.write_text(yaml.safe_dump({"modules": {stage: module}, **(top or {})}))
    return resolve_experiment(file, words, {}, stage)


def test_a_file_of_primus_becomes_settings_of_the_schema(tmp_path: Path) -> None:
    given = {
        "finetune_lr": 1e-5,
        "peft": "lora",
        "packed_sequence": True,
        "dataset_name": "tatsu-lab/alpaca",
        "precision_config": "bf16_mixed",
        "train_iters": 20,
        "lr_warmup_iters": 50,
        "pipeline_dtype": None,
        "use_megatron_fsdp": False,
        "stderr_sink_level": "DEBUG",
        "recompute_granularity": "full",
    }
    blocks: dict[str, Any] = {"peft": {"dim": 16, "alpha": 8}, "model": {"moe_router_force_load_balancing": True}}
    resolved = resolve(tmp_path, given, top=blocks)
    trainer = resolved.experiment.trainer
    assert trainer.backend_args == {
        "peft": "lora",
        "peft_dim": 16,
        "peft_alpha": 8,
        "moe_router_force_load_balancing": True,
        "recompute_granularity": "full",
    }
    assert (trainer.data.sft_data_path, trainer.data.packed_sequence) == ("hf:tatsu-lab/alpaca", True)
    assert (trainer.optimizer.lr, trainer.optimizer.lr_warmup_iters, trainer.training.bf16) == (1e-5, 19, True)
    assert (trainer.checkpoint.load, trainer.checkpoint.finetune) == ("hf:Qwen/Qwen3-8B", True)
    assert trainer.data.tokenizer_model == "Qwen/Qwen3-8B"
    assert any("capped at 19" in note for note in resolved.notes)


def test_adapters_and_whole_models_have_their_own_default_rate(tmp_path: Path) -> None:
    assert resolve(tmp_path, {}).experiment.trainer.optimizer.lr == 5e-6
    assert resolve(tmp_path, {"peft": "lora"}).experiment.trainer.optimizer.lr == 1e-4
    assert resolve(tmp_path, {}).experiment.trainer.data.sft_data_path == "hf:rajpurkar/squad"


def test_pre_training_needs_no_published_weights(tmp_path: Path) -> None:
    given = {"mock": True, "skip_save": True, "train_iters": 600, "flavor": "qwen3_8b_pretrain_config"}
    resolved = resolve(tmp_path, given, stage="pre_trainer")
    trainer = resolved.experiment.trainer
    assert (trainer.data.mock_data, trainer.checkpoint.load, trainer.checkpoint.save_interval) == (True, None, None)
    assert any("flavor" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"peft": "lorra"}, "peft: lorra: Invalid enum value"),
        ({"peft_dmi": 8}, "did you mean 'peft_dim'"),
        ({"peft": "lora", "peft_dim": 0}, "peft_dim: 0: Expected `int` >= 1"),
        ({"peft": "lora", "peft_target_modules": ["linear_qvk"]}, "did you mean 'linear_qkv'"),
        ({"precision_config": "fp16_mixed"}, "precision_config: fp16_mixed is not supported"),
        ({"use_megatron_fsdp": True}, "use_megatron_fsdp: weights are not sharded here"),
        ({"packed_train_data_path": "/x.npy"}, "packed arrays of the MLPerf reference"),
        ({"recipe": "llama.llama3"}, "recipe and flavor belong together"),
        ({"device": "cpu", "fp8": "hybrid"}, "fp8: hybrid: megatron_bridge supports it only with Transformer Engine"),
        (
            {"packed_sequence": True, "pipeline_model_parallel_size": 2},
            "packed_sequence: true is not supported with pipeline",
        ),
        ({"sft_data_path": "none.jsonl"}, "sft_data_path: no such data: none.jsonl"),
        ({"mock_data": True, "sft_data_path": "hf:a/b"}, "sft_data_path and mock_data exclude each other"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_key(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(tmp_path, given)
    assert problem in f"{caught.value.problem} {caught.value.hint}"


def test_a_model_outside_of_transformers_needs_its_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model of transformers"):
        resolve(tmp_path, {"mock_data": True}, model="mamba_370M.yaml")
    recipe = {"recipe": "mamba.mamba2", "flavor": "mamba2_370m_finetune_config", "init": "engine"}
    assert resolve(tmp_path, {"mock_data": True, **recipe}, model="mamba_370M.yaml")


def test_a_framework_that_only_pre_trains_names_those_that_fine_tune(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(tmp_path, {"mock_data": True}, "--framework", "torchtitan")
    assert caught.value.problem == "module post_trainer: framework torchtitan does not train it"
    assert caught.value.hint == "frameworks that do: megatron, megatron-bridge, native"


def test_another_framework_refuses_adapters_and_names_the_one_that_has_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'peft'; native and megatron_bridge train adapters"):
        resolve(tmp_path, LORA, "--framework", "megatron")

"""Files of Axolotl and LLaMA-Factory as experiments: each key is translated or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.write_file import format_result
from primus.errors import UsageError
from primus.experiment import resolve_experiment

AXOLOTL = {
    "base_model": "someone/Llama-3.2-1B-Instruct",
    "datasets": [{"path": "someone/rows", "type": "alpaca"}, {"path": "own.jsonl", "type": "mine", "split": "train"}],
    "val_set_size": 0.1,
    "sequence_len": 1024,
    "sample_packing": True,
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_linear": True,
    "peft_use_rslora": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-4",
    "bf16": "auto",
    "warmup_ratio": 0.1,
    "load_in_8bit": True,
    "evals_per_epoch": 4,
    "flash_attention": True,
    "new_switch": 7,
    "wandb_project": None,
}
LLAMA_FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "stage": "dpo",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "q_proj,v_proj",
    "pref_beta": 0.2,
    "pref_loss": "sigmoid",
    "dataset": "one,two",
    "template": "qwen3",
    "cutoff_len": 512,
    "per_device_train_batch_size": 1,
    "learning_rate": 5.0e-6,
    "max_steps": 30,
    "bf16": True,
    "mask_history": True,
    "ddp_timeout": 180000000,
    "new_switch": 7,
}


def write_yaml(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(
    ("given", "expected", "named"),
    [
        (
            AXOLOTL,
            {
                "model": "llama3.2_1B",
                "load": "hf:someone/Llama-3.2-1B-Instruct",
                "finetune": True,
                "sft_data_path": ["hf:someone/rows", "own.jsonl"],
                "split": "90,10,0",
                "seq_length": 1024,
                "packed_sequence": True,
                "truncation": "drop",
                "peft": "lora",
                "peft_dim": 16,
                "peft_alpha": 32,
                "peft_rslora": True,
                "micro_batch_size": 2,
                "global_batch_size": 8,
                "optimizer": "adamw_8bit",
                "lr": 2e-4,
                "weight_decay": 0.0,
                "adam_beta2": 0.999,
                "lr_warmup_fraction": 0.1,
                "lr_decay_style": "cosine",
                "train_iters": 1000,
            },
            {
                "datasets[1].type",
                "gradient_accumulation_steps",
                "num_epochs",
                "load_in_8bit",
                "evals_per_epoch",
                "new_switch",
            },
        ),
        (
            LLAMA_FACTORY,
            {
                "model": "qwen3_8B",
                "loss": "dpo",
                "beta": 0.2,
                "peft_target_modules": ["linear_qkv"],
                "peft_alpha": 16,
                "truncation": "right",
                "train_on": "last",
                "train_iters": 30,
                "lr": 5e-6,
                "lr_decay_style": "linear",
                "global_batch_size": 1,
                "eval_iters": 0,
            },
            {"dataset", "template", "cutoff_len", "gradient_accumulation_steps", "lora_target_modules", "new_switch"},
        ),
    ],
)
def test_each_key_is_translated_or_named(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any], named: set[str]
) -> None:
    config = read_foreign_file(write_yaml(tmp_path, given), {})
    settings = {**config.settings, **config.model}
    assert {key: settings.get(key) for key in expected} == expected
    assert {each.key for each in config.warnings} == named
    text = format_result(config)
    assert all(f"#   {name}" in text for name in named) and "mock_data" not in text
    (tmp_path / "ours.yaml").write_text(text)
    for number in range(2):  # the data that the file names
        name = "own" if given is AXOLOTL else ("one", "two")[number]
        (tmp_path / f"{name}.jsonl").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        sources = (["--sft_data_path", "one.jsonl"],) if given is LLAMA_FACTORY else ([],)
        trainer = resolve_experiment(tmp_path / "ours.yaml", tuple(*sources), {}).experiment.trainer
    assert trainer.framework == "native"
    assert trainer.backend_args["peft"] == "lora" and trainer.checkpoint.finetune


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (AXOLOTL | {"rl": "grpo"}, "rl: grpo: reinforcement learning"),
        (LLAMA_FACTORY | {"stage": "rm"}, "stage: rm: a reward model"),
    ],
)
def test_other_training_is_refused(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_foreign_file(write_yaml(tmp_path, given), {})


def test_quantized_adapters_and_unknown_choices_are_named(tmp_path: Path) -> None:
    changes = {"adapter": "qlora", "optimizer": "lion", "lr_scheduler": "rex", "chat_template": "llama3"}
    config = read_foreign_file(write_yaml(tmp_path, AXOLOTL | changes | {"max_steps": 5}), {})
    assert changes.keys() <= {each.key for each in config.warnings}
    assert config.settings["train_iters"] == 5

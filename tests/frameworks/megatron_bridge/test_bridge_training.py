"""Fine-tuning with Megatron-Bridge itself: adapters on a CPU, their files, and a resumed run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.data.instruction.test_instruction_data import converse, write_rows, write_tokenizer
from tests.engine_python import engine_variables

from fakes import cli
from primus.runs import events
from primus.runs.settings_in_force import read_settings_in_force

pytestmark = [pytest.mark.engine("megatron-bridge"), pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {
    "tokenizer_model": "tok",
    "sft_data_path": "rows.jsonl",
    "packed_sequence": True,
    "split": "100,0,0",
    "vocab_size": 300,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 4,
    "bf16": False,
    "device": "cpu",
    "compile": False,
    "lr": 0.01,
    "lr_warmup_iters": 1,
    "eval_iters": 0,
    "save_interval": 2,
    "peft": "lora",
    "peft_dim": 4,
    "peft_alpha": 8,
}


def read_losses(run: Path) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event.get("kind", event.get("event")) == "step"}


def test_adapters_are_trained_saved_for_peft_and_resumed(tmp_path: Path) -> None:
    variables = engine_variables("megatron-bridge")
    write_tokenizer(tmp_path / "tok")
    write_rows(tmp_path / "rows.jsonl", [converse(f"{n}+1?", str(n + 1)) for n in range(40)])
    module: dict[str, Any] = {"framework": "megatron_bridge", "model": "tiny.yaml", "overrides": SETTINGS}
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump({"exp_name": "lora", "modules": {"post_trainer": module}}))
    words = ("direct", "--", "train", "posttrain")
    done = cli.run(*words, "--config", "exp.yaml", cwd=tmp_path, timeout_s=280, **variables)
    assert done.returncode == 0, done.stderr
    run = (tmp_path / "output/lora/latest").resolve()
    first = read_losses(run)
    live = {each.key: each.in_force for each in read_settings_in_force(events.read_events(run / "events.jsonl"))}
    assert live["vocab_rows"] == 384, "padded as by Megatron-LM"
    adapter = json.loads((run / "checkpoints/step_00000004/adapter/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["peft_type"]) == (4, 8, "LORA")
    assert (run / "checkpoints/step_00000004/adapter/adapter_model.safetensors").stat().st_size > 0
    shutil.rmtree(run / "checkpoints/step_00000004")
    done = cli.run(*words, "--run", str(run), cwd=tmp_path, timeout_s=280, **variables)
    assert done.returncode == 0, done.stderr
    assert read_losses(run) == first, "the steps after the checkpoint give the same losses, bit by bit"

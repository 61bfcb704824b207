"""A configuration of MaxText becomes an experiment for MaxText, with the settings that primus has no key for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from primus.cli.main import main
from primus.config.frameworks.known_keys import read_maxtext_keys
from primus.experiment import resolve_experiment

CONFIG = {
    "base_config": "base.yml",
    "model_name": "llama3-8b",
    "steps": 20,
    "per_device_batch_size": 2,
    "max_target_length": 4096,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "remat_policy": "save_qkv_proj",
    "quantization": "fp8",
    "attention": "cudnn_flash_te",
    "ici_fsdp_parallelism": 8,
    "sparse_matmul": read_maxtext_keys().keys["sparse_matmul"].default,
    "enable_goodput_recording": False,
    "scan_layer": True,
}


def test_a_configuration_of_maxtext_stays_one_for_maxtext(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "train.yml", tmp_path / "experiment.yaml"
    source.write_text(yaml.safe_dump(CONFIG))
    assert main(["direct", "--", "config", "import", str(source), "--output", str(target)]) == 0
    assert "scan_layer True: unknown setting; did you mean scan_layers?" in capsys.readouterr().err
    module = yaml.safe_load(target.read_text())["modules"]["pre_trainer"]
    assert (module["framework"], module["model"]) == ("maxtext", "llama3_8B.yaml")
    kept = {key: module["overrides"].get(key) for key in CONFIG}
    wanted = {"model_name", "remat_policy", "quantization", "attention", "ici_fsdp_parallelism"}
    assert {key for key, value in kept.items() if value is not None} == wanted
    assert all(kept[key] == CONFIG[key] for key in wanted)
    assert module["overrides"]["train_iters"] == 20 and module["overrides"]["mock_data"] is True
    assert main(["direct", "--", "config", "check", "--config", str(target)]) == 0


def test_sizes_that_a_configuration_leaves_out_are_those_of_maxtext(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "smoke.yml", tmp_path / "experiment.yaml"
    shape = {"base_emb_dim": 256, "base_num_query_heads": 4, "base_num_kv_heads": 4, "base_mlp_dim": 512}
    base = {"base_config": "configs/base.yml", "dataset_type": "synthetic", "enable_checkpointing": False, "steps": 10}
    source.write_text(yaml.safe_dump(base | shape | {"base_num_decoder_layers": 2}))
    assert main(["direct", "--", "config", "import", str(source), "--output", str(target)]) == 0
    assert "base_config" not in capsys.readouterr().err
    overrides = yaml.safe_load(target.read_text())["modules"]["pre_trainer"]["overrides"]
    assert (overrides["vocab_size"], overrides["kv_channels"], overrides["num_layers"]) == (32_000, 128, 2)
    assert main(["direct", "--", "config", "check", "--config", str(target)]) == 0
    defaults = {key: read_maxtext_keys().keys[key].default for key in ("vocab_size", "head_dim", "base_mlp_dim")}
    assert list(defaults.values()) == [32_000, 128, 7168]


def test_an_imported_batch_is_one_of_tensor_parallel_devices_and_stays_so(tmp_path: Path) -> None:
    source, target = tmp_path / "tensor.yml", tmp_path / "experiment.yaml"
    source.write_text(yaml.safe_dump(CONFIG | {"ici_tensor_parallelism": 4}))
    assert main(["direct", "--", "config", "import", str(source), "--output", str(target)]) == 0
    assert resolve_experiment(target, (), {}).experiment.trainer.training.micro_batch_size == 8


def test_settings_that_experiment_files_refuse_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "muon.yml"
    source.write_text(yaml.safe_dump(CONFIG | {"opt_type": "muon", "load_parameters_path": "gs://a/b"}))
    assert main(["direct", "--", "config", "import", str(source)]) == 0
    told = capsys.readouterr().err
    assert "opt_type muon: only AdamW is supported; set opt_type: adamw" in told
    assert "load_parameters_path gs://a/b: a checkpoint of MaxText's own format" in told


def test_a_base_that_is_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "serve.yml"
    source.write_text(yaml.safe_dump(CONFIG | {"base_config": "inference/inference_jetstream.yml"}))
    assert main(["direct", "--", "config", "import", str(source)]) == 0
    assert "base_config inference/inference_jetstream.yml: its settings are not read" in capsys.readouterr().err

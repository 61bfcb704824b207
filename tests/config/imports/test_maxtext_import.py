"""A configuration of MaxText becomes an experiment for MaxText, with the settings that primus has no key for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from primus.cli.main import main
from primus.config.frameworks.known_keys import read_maxtext_keys

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
    assert "MaxText has no such setting; did you mean 'scan_layers'?" in capsys.readouterr().err
    module = yaml.safe_load(target.read_text())["modules"]["pre_trainer"]
    assert (module["framework"], module["model"]) == ("maxtext", "llama3_8B.yaml")
    kept = {key: module["overrides"].get(key) for key in CONFIG}
    wanted = {"model_name", "remat_policy", "quantization", "attention", "ici_fsdp_parallelism"}
    assert {key for key, value in kept.items() if value is not None} == wanted
    assert all(kept[key] == CONFIG[key] for key in wanted)
    assert module["overrides"]["train_iters"] == 20 and module["overrides"]["mock_data"] is True
    assert main(["direct", "--", "config", "check", "--config", str(target)]) == 0

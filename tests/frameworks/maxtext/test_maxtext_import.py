"""A configuration of MaxText becomes an experiment for MaxText, with the settings that primus has no key for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from primus.cli.main import main
from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.write_file import format_result
from primus.config.load import load_experiment
from primus.errors import UsageError
from primus.experiment import resolve_experiment
from primus.frameworks.maxtext.names import read_settings

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
    "sparse_matmul": read_settings().keys["sparse_matmul"].default,
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
    defaults = {key: read_settings().keys[key].default for key in ("vocab_size", "head_dim", "base_mlp_dim")}
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


def test_what_base_yml_states_for_every_model_is_no_setting_of_a_dense_one(tmp_path: Path) -> None:
    file = tmp_path / "copy.yml"
    file.write_text(
        "model_name: default\nbase_emb_dim: 512\nattention_type: global\nkv_lora_rank: 512\nqk_nope_head_dim: 128\n"
        "num_experts: 1\nnum_experts_per_tok: 1\nshared_experts: 0\nfirst_num_dense_layers: 0\nrope_type: default\n"
        "rope_factor: 40\nbeta_fast: 32\ndataset_type: synthetic\nsteps: 3\nq_lora_rank: 0\n"
    )
    config = read_foreign_file(file, {})
    experiment = tmp_path / "e.yaml"
    experiment.write_text(format_result(config))
    model = resolve_experiment(experiment, (), {}).experiment.trainer.model
    assert (model.kv_lora_rank, model.moe_router_topk, model.rotary_scaling_factor) == (None, 2, 1.0)
    assert config.warnings == []


@pytest.mark.parametrize("rank", [0, 64])
def test_latent_attention_keeps_its_widths(rank: int, tmp_path: Path) -> None:
    file = tmp_path / "mla.yml"
    file.write_text(f"base_emb_dim: 512\nattention_type: mla\nkv_lora_rank: 96\nq_lora_rank: {rank}\nsteps: 3\n")
    model = read_foreign_file(file, {}).model
    assert (model["kv_lora_rank"], model.get("q_lora_rank", 0)) == (96, rank)


@pytest.mark.parametrize("switch", ["use_sft", "use_dpo"])
def test_another_objective_than_pretraining_is_said(switch: str, tmp_path: Path) -> None:
    text = f"model_name: llama3.1-8b\n{switch}: true\ndataset_type: synthetic\nsteps: 3\nlearning_rate: 1.0e-5\n"
    (tmp_path / "a.yml").write_text(text)
    config = read_foreign_file(tmp_path / "a.yml", {})
    assert [each.key for each in config.warnings] == [switch]
    overrides = f"{{{switch}: true, dataset_type: synthetic}}"
    module = f"{{framework: maxtext, model: llama3.1_8B.yaml, overrides: {overrides}}}"
    (tmp_path / "e.yaml").write_text(f"modules: {{pre_trainer: {module}}}\n")
    with pytest.raises(UsageError, match=switch):
        load_experiment(tmp_path / "e.yaml", environ={})


def test_sizes_beside_the_name_of_a_model_are_those_of_the_model(tmp_path: Path) -> None:
    text = "model_name: llama3.1-8b\nbase_num_decoder_layers: 4\ndataset_type: synthetic\nsteps: 3\n"
    (tmp_path / "a.yml").write_text(text)
    config = read_foreign_file(tmp_path / "a.yml", {})
    assert "num_layers" not in config.model
    assert "as MaxText does without override_model_config" in config.warnings[0].reason
    (tmp_path / "a.yml").write_text(text + "override_model_config: true\n")
    assert read_foreign_file(tmp_path / "a.yml", {}).model["num_layers"] == 4


def test_names_of_earlier_releases_keep_their_values(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(
        "model_name: kimi-k2-1t\ncosine_learning_rate_final_fraction: 0.3\nsteps: 3\nlog_period: 2\n"
    )
    settings = read_foreign_file(tmp_path / "a.yml", {}).settings
    assert (settings["min_lr_ratio"], settings["model"]) == (0.3, "kimi_k2")


@pytest.mark.parametrize(
    ("scale", "layers", "width", "heads", "feed_forward"),
    # get_individual_scales of MaxText/pyconfig.py doubles heads with the feed-forward, then the width, then the layers
    [(1, 4, 64, 2, 128), (2, 4, 64, 4, 256), (4, 4, 128, 4, 256), (8, 8, 128, 4, 256), (32, 8, 256, 8, 512)],
)
def test_a_scale_of_all_parameters_multiplies_the_sizes(
    scale: int, layers: int, width: int, heads: int, feed_forward: int, tmp_path: Path
) -> None:
    """As MaxText/configs/largest_job/32b.sh of ultrons/maxtext."""
    source = tmp_path / "train.yml"
    sizes = {"base_num_decoder_layers": 4, "base_emb_dim": 64, "base_num_heads": 2, "base_mlp_dim": 128}
    source.write_text(yaml.safe_dump({"base_config": "base.yml", "global_parameter_scale": scale} | sizes))
    found = read_foreign_file(source, {}).model
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
    assert [found[name] for name in names] == [layers, width, heads, heads, feed_forward]


def test_a_scale_that_maxtext_refuses_is_told(tmp_path: Path) -> None:
    source = tmp_path / "train.yml"
    source.write_text(yaml.safe_dump({"base_config": "base.yml", "global_parameter_scale": 6}))
    assert "global_parameter_scale" in [each.key for each in read_foreign_file(source, {}).warnings]


@pytest.mark.parametrize(("scale", "is_told"), [(1, False), (2, True)])
def test_the_scale_of_the_first_maxtext_is_told(scale: int, is_told: bool, tmp_path: Path) -> None:
    source = tmp_path / "train.yml"
    source.write_text(yaml.safe_dump({"base_config": "base.yml", "base_emb_dim": 64, "scale": scale}))
    found = read_foreign_file(source, {})
    assert ("scale" in [each.key for each in found.warnings]) == is_told
    assert found.model["hidden_size"] == 64


def test_values_that_maxtext_has_by_default_are_named(tmp_path: Path) -> None:
    source = tmp_path / "train.yml"
    written = {"base_config": "base.yml", "dataset_type": "synthetic", "steps": 3, "sparse_matmul": True}
    source.write_text(yaml.safe_dump(written | {"remat_policy": "minimal", "enable_profiler": True}))
    found = read_foreign_file(source, {})
    assert found.unchanged == ["sparse_matmul"]
    assert "# As maxtext has it by default: sparse_matmul" in format_result(found)
    filled = {"micro_batch_size": 12, "bf16": True, "save_interval": 10000, "auto_continue_train": True}
    assert filled.items() <= found.defaults.items()
    assert not found.warnings and "recompute_activations" not in found.defaults


BASE_FILE = """\
base_num_heads: 6
head_dim: 256
vocab_size: 32768
warmup_steps_fraction: 0.3
cosine_learning_rate_final_fraction: 0.2
log_period: 100
steps: 90
ici_fsdp_parallelism: 4
xm_classes: 3
"""


def test_the_base_of_a_command_is_that_of_its_checkout(tmp_path: Path) -> None:
    """As MaxText/configs of ultrons/maxtext, of 2023, and of Froggy111/maxtext-stuff."""
    script = tmp_path / "MaxText/configs/v4/8b.sh"
    script.parent.mkdir(parents=True)
    line = "python3 MaxText/train.py MaxText/configs/base.yml steps=10 base_emb_dim=64 dataset_type=synthetic"
    script.write_text(f"{line}\n")
    alone = read_foreign_file(script, {})
    assert "from which it may differ" in {each.key: each.reason for each in alone.warnings}["base_config"]
    assert (alone.model["vocab_size"], alone.settings["lr_warmup_fraction"]) == (32000, 0.1)
    (tmp_path / ".git").mkdir()
    (tmp_path / "MaxText/configs/base.yml").write_text(BASE_FILE)
    found = read_foreign_file(script, {})
    shape = [found.model[key] for key in ("num_attention_heads", "kv_channels", "vocab_size", "hidden_size")]
    assert shape == [6, 256, 32768, 64]
    assert [found.settings[key] for key in ("train_iters", "lr_warmup_fraction", "min_lr_ratio")] == [10, 0.3, 0.2]
    assert "lr_warmup_fraction" not in found.defaults and "ici_fsdp_parallelism" not in found.settings
    assert [each.key for each in found.warnings] == ["the script", "base_config"]
    assert "xm_classes of it" in found.warnings[1].reason
    script.write_text(f"set -e\ncat /proc/missing\n{line.replace(' MaxText/configs', ' $PWD/MaxText/configs')}\n")
    assert read_foreign_file(script, {}).model["vocab_size"] == 32768
    script.write_text(f"{line} model_name=llama2-7b\n")
    assert "vocab_size" not in read_foreign_file(script, {}).model


def test_the_base_beside_a_file_is_read_with_its_own(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text(BASE_FILE)
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nlearning_rate: 0.5\nlog_period: 7\n")
    (tmp_path / "a.yml").write_text("base_config: mine.yml\nsteps: 4\ndataset_type: synthetic\n")
    settings = read_foreign_file(tmp_path / "a.yml", {}).settings
    assert [settings[key] for key in ("train_iters", "lr", "log_interval", "lr_warmup_fraction")] == [4, 0.5, 7, 0.3]


@pytest.mark.parametrize(("written", "is_told"), [("", False), ("mtp_num_layers: 1\n", True)])
def test_a_model_of_maxtext_has_no_multi_token_prediction(written: str, is_told: bool, tmp_path: Path) -> None:
    """Its models state none; the preset of DeepSeek-V3 does."""
    (tmp_path / "a.yml").write_text(f"model_name: deepseek3-671b\ndataset_type: synthetic\nsteps: 3\n{written}")
    found = read_foreign_file(tmp_path / "a.yml", {})
    assert found.model["mtp_num_layers"] == 0
    assert ("mtp_num_layers" in [each.key for each in found.warnings]) == is_told


def test_names_of_the_first_maxtext_are_known(tmp_path: Path) -> None:
    """As MaxText/configs/base.yml of rlrs/maxtext and EleutherAI/maxtext, of 2023."""
    source = tmp_path / "base.yml"
    old = {"base_num_heads": 8, "save_period": 70, "enable_checkpointing": True, "rms_norm_epsilon": 1e-6}
    source.write_text(yaml.safe_dump({"base_config": "base.yml"} | old))
    found = read_foreign_file(source, {})
    assert (found.model["num_attention_heads"], found.model["num_query_groups"]) == (8, 8)
    assert (found.settings["save_interval"], found.model["norm_epsilon"]) == (70, 1e-6)

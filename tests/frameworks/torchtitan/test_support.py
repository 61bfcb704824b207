"""What the torchtitan backend accepts and refuses, without a tensor library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_python import run_engine
from primus.config.load import load_experiment
from primus.config.schema import ModelSpec, ParallelConfig, TrainingConfig
from primus.errors import UsageError
from primus.experiment import resolve_experiment
from primus.frameworks import torchtitan
from primus.frameworks.torchtitan.backend_settings import check_settings, list_field_types
from primus.frameworks.torchtitan.engine.layout import plan_layout
from primus.frameworks.torchtitan.families import find_family

CheckSettings = Callable[..., None]


@pytest.fixture
def check_experiment(tmp_path: Path) -> CheckSettings:
    """``check_experiment("llama3.1_8B", key=value)`` checks an experiment as `config check` does."""

    def check_file(model: str = "tiny", **settings: Any) -> None:
        file = tmp_path / "experiment.yaml"
        overrides = {"mock_data": True, "seq_length": 128, **settings}
        module = {"framework": "torchtitan", "model": model, "overrides": overrides}
        file.write_text(yaml.safe_dump({"exp_name": "test", "modules": {"pre_trainer": module}}))
        resolve_experiment(file, [], {})

    return check_file


@pytest.mark.parametrize("model", ["llama3.1_8B", "llama3.2_1B", "qwen2.5_7B", "qwen3_8B", "kimi_k2", "llama4_17B16E"])
def test_published_models_are_accepted(check_experiment: CheckSettings, model: str) -> None:
    check_experiment(model)


def test_what_a_preset_has_and_torchtitan_lacks_is_left_out_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    module = {"framework": "torchtitan", "model": "deepseek_v3", "overrides": {"mock_data": True}}
    file.write_text(yaml.safe_dump({"exp_name": "test", "modules": {"pre_trainer": module}}))
    resolved = load_experiment(file, environ={})
    assert resolved.experiment.trainer.model.mtp_num_layers == 0
    assert any("mtp_num_layers of the model preset is not applied" in note for note in resolved.notes)


def test_gpt_oss_is_accepted_for_gpus_only(check_experiment: CheckSettings) -> None:
    check_experiment("gpt_oss_20B")
    with pytest.raises(UsageError, match="attention_sinks: true: torchtitan has attention sinks on GPUs only"):
        check_experiment("gpt_oss_20B", device="cpu")


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("llama4_17B16E", {"seq_length": 16384}, "attention_chunk_size: 8192: .*whole sequence, of 16384 tokens"),
        ("llama4_17B16E", {"qk_layernorm": True}, "no_rope_freq: 4: .*of the shape of Llama 4 only"),
        ("llama4_17B16E", {"moe_router_topk": 2}, "moe_apply_probs_on_input: true needs one expert"),
        ("mixtral_8x7B", {"moe_aux_loss_coeff": 0.02}, "moe_aux_loss_coeff: 0.02: .*load-balancing loss"),
        ("deepseek_v3", {"mtp_num_layers": 1}, "mtp_num_layers: 1: .*multi-token prediction"),
        ("mamba_130M", {}, "hybrid_layer_pattern: M: "),
        ("tiny", {"nonfinite_policy": "rewind", "save_interval": 1}, "nonfinite_policy: rewind: "),
        ("tiny", {"loss_spike_policy": "skip"}, "loss_spike_policy: skip: "),
        ("tiny", {"fp8": "hybrid"}, "fp8: hybrid: .*e5m2"),
        ("tiny", {"fp8": "e4m3", "device": "cpu"}, "fp8: e4m3: .*GPUs only"),
        ("tiny", {"reset_attention_mask": True, "device": "cpu"}, "reset_attention_mask: true: .*GPUs only"),
        ("tiny", {"context_parallel_size": 2, "device": "cpu"}, "context_parallel_size: 2: .*GPUs only"),
        ("llama3.2_1B", {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size: 2: .*output head"),
        ("llama3.1_8B", {"tensor_model_parallel_size": 16}, "tensor_model_parallel_size: 16: .*whole key/value heads"),
        ("llama3.1_8B", {"rope_type": "yarn"}, "rope_type: yarn: .*DeepSeek-V3 and gpt-oss models only"),
        ("llama3.1_8B", {"window_size": 128}, "window_size: 128: .*gpt-oss models"),
        ("tiny", {"dataloader": "engine"}, "dataloader: engine: "),
    ],
)
def test_what_torchtitan_cannot_do_is_refused_by_key_and_reason(
    check_experiment: CheckSettings, model: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_experiment(model, **settings)


def test_keep_last_n_1_is_accepted_as_primus_deletes_old_checkpoints(check_experiment: CheckSettings) -> None:
    check_experiment(keep_last_n=1, save_interval=10)


@pytest.mark.parametrize(
    ("settings", "words", "hint"),
    [
        ({"parallelism": {"pipeline_parallel_schedul": "1F1B"}}, "no field", "pipeline_parallel_schedule"),
        ({"training.gc_frequency": 5}, "no field 'training.gc_frequency'", "training.gc_freq"),
        ({"training": {"gc_freq": "often"}}, "training.gc_freq: often: must be an integer", ""),
        ({"training": {"gc_freq": True}}, "training.gc_freq: true: must be an integer", ""),
        ({"parallelism": {"fsdp_reshard_after_forward": "maybe"}}, "must be default or always or never", ""),
        ({"training": {"steps": 5}}, "training.steps: 5: primus sets this field", "train_iters"),
        ({"training": {"local_batch_size": 5}}, "primus sets this field", "micro_batch_size"),
        ({"metrics": {"log_freq": 5}}, "metrics.log_freq: 5: primus sets this field", "log_interval"),
        ({"checkpoint": {"keep_latest_k": 1}}, "primus sets this field", "keep_last_n"),
    ],
)
def test_settings_of_torchtitans_tree_are_checked(settings: dict[str, Any], words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        check_settings(settings)
    assert hint in raised.value.hint


def test_settings_of_torchtitans_tree_are_accepted_nested_or_with_dots() -> None:
    check_settings({"training": {"gc_freq": 5}, "activation_checkpoint.mode": "selective"})
    check_settings({"parallelism.module_fqns_per_model_part": None, "compile": {"components": ["loss"]}})


def test_a_layout_needs_processes_and_micro_batches_for_each_stage() -> None:
    training = TrainingConfig(micro_batch_size=2, global_batch_size=8)
    found = plan_layout(training, ParallelConfig(pipeline_model_parallel_size=2), world=4)
    assert (found.data_size, found.num_micro_batches, found.local_batch_size) == (2, 2, 4)
    with pytest.raises(UsageError, match="3 processes cannot be laid out"):
        plan_layout(training, ParallelConfig(tensor_model_parallel_size=2), world=3)
    with pytest.raises(UsageError, match="a pipeline of 4 stages needs as many micro batches") as raised:
        plan_layout(training, ParallelConfig(pipeline_model_parallel_size=4), world=8)
    assert "16" in raised.value.hint


def test_the_check_imports_no_tensor_library() -> None:
    code = (
        "import sys; from primus.frameworks import torchtitan; from primus.frameworks.torchtitan import support;"
        "from primus.frameworks.torchtitan import backend_settings as b; b.check_settings({'compile.components': []});"
        "print([name for name in ('torch', 'numpy', 'torchtitan') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.engine("torchtitan")
def test_the_fields_are_those_of_the_installed_torchtitan() -> None:
    code = (
        "import json; from primus import registry; from primus.patch import PATCHES;"
        "registry.load_plug_in(PATCHES, 'torchtitan-without-gpu').apply();"
        "from primus.frameworks.torchtitan.describe_fields import list_fields; print(json.dumps(list_fields()))"
    )
    found = yaml.safe_load(run_engine("torchtitan", code).splitlines()[-1])
    file = Path(torchtitan.__file__).parent / "fields.yaml"
    assert found == yaml.safe_load(file.read_text())
    assert set(list_field_types()) >= set(found)


def test_the_family_follows_from_the_parts_of_a_model() -> None:
    shape = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    found = {
        find_family(ModelSpec(**shape, **parts))
        for parts in ({}, {"qk_layernorm": True}, {"multi_latent_attention": True}, {"attention_sinks": True})
    }
    assert found == {"llama", "qwen", "deepseek", "gpt_oss"}

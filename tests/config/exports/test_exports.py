"""What is exported is read by the other frameworks themselves, or imported again without a difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import to_builtins
from msgspec.structs import replace

from engine_python import engine_python, run_engine
from primus import registry
from primus.cli.main import main
from primus.config.exports.hugging_face import format_model_config
from primus.config.exports.write_file import format_foreign_file
from primus.config.extended_files import load_model
from primus.config.imports.foreign_config import drop_defaults, make_model
from primus.config.imports.read_file import read_foreign_file
from primus.config.load import Resolved, load_experiment
from primus.config.schedule import count_wsd_decay_steps
from primus.errors import UsageError
from primus.frameworks.maxtext.export_file import write_model_settings
from primus.models.counts import count_parameters

PUBLISHED = [
    "llama2_7B",
    "llama2_70B",
    "llama3.1_8B",
    "llama3.1_405B",
    "llama3.2_1B",
    "qwen2.5_0.5B",
    "qwen2.5_7B",
    "qwen3_0.6B",
    "qwen3_4B",
    "qwen3_8B",
    "qwen3_30B_A3B",
    "mixtral_8x7B_v0.1",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss_20B",
]
EXPERIMENT = """\
workspace: ./out
modules:
  pre_trainer:
    model: {model}
    overrides:
      mock_data: true
      train_iters: 20
      micro_batch_size: 2
      global_batch_size: 8
      seq_length: 64
      bf16: false
      lr: 3.0e-3
      min_lr: 3.0e-4
      lr_warmup_iters: 5
      split: "100,0,0"
"""
COUNT = """
import json, pathlib, torch, transformers
counted = {{}}
for folder in pathlib.Path({folder!r}).iterdir():
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # The bias that balances DeepSeek-V3's experts is a buffer in transformers.
    biases = sum(each.numel() for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    counted[folder.name] = sum(weight.numel() for weight in model.parameters()) + biases
print(json.dumps(counted))
"""
SMALL = "--num_layers 2 --hidden_size 64 --ffn_hidden_size 96 --num_attention_heads 4 --num_query_groups 2".split()
SMALL += "--vocab_size 256 --kv_channels null".split()


def resolve(folder: Path, model: str, *overrides: str) -> Resolved:
    file = folder / "e.yaml"
    file.write_text(EXPERIMENT.format(model=model))
    return load_experiment(file, overrides, environ={})


def export(folder: Path, target: str, name: str, model: str, *overrides: str) -> Path:
    file = folder / name
    file.write_text(format_foreign_file(target, resolve(folder, model, *overrides), None).text)
    return file


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_model_survives_the_way_to_hugging_face_and_back(preset: str, tmp_path: Path) -> None:
    model = load_model(preset)
    file = tmp_path / "config.json"
    file.write_text(format_model_config(model).text)
    config = read_foreign_file(file, {})
    returned = make_model(config)
    assert count_parameters(returned) == count_parameters(model)
    assert drop_defaults(to_builtins(returned)) == drop_defaults(to_builtins(replace(model, hf_name="")))
    assert not config.warnings


@pytest.mark.engine("huggingface")
def test_transformers_builds_the_exported_models_with_our_parameters(tmp_path: Path) -> None:
    for preset in PUBLISHED:
        (tmp_path / preset).mkdir()
        (tmp_path / preset / "config.json").write_text(format_model_config(load_model(preset)).text)
    counted = json.loads(run_engine("huggingface", COUNT.format(folder=str(tmp_path))).splitlines()[-1])
    assert counted == {preset: count_parameters(load_model(preset)).total_parameters for preset in PUBLISHED}


def test_a_shape_that_no_family_has_is_refused_with_its_keys() -> None:
    with pytest.raises(UsageError, match="attention_output_gate"):
        format_model_config(load_model("qwen3_5_35B_A3B"))


@pytest.mark.parametrize(("key", "value"), [("final_logit_softcapping", 30.0), ("mtp_num_layers", 1)])
def test_a_part_that_only_named_models_of_maxtext_have_is_refused_without_the_name(key: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{key}: {value}: MaxText has no .* outside of its"):
        write_model_settings(replace(load_model("llama3.1_8B"), **{key: value}))


@pytest.mark.parametrize("target", ["torchtitan", "maxtext"])
@pytest.mark.parametrize(
    "part",
    [
        {"activation_clamp": 7.0},
        {"no_rope_freq": 4},
        {"attention_chunk_size": 16},
        {"rotary_percent": 0.5},
        {"global_kv_channels": 32},
        {"num_residual_streams": 2},
        {"qk_layernorm": True, "qk_layernorm_across_heads": True},
    ],
)
def test_a_part_of_a_model_that_a_file_cannot_say_is_refused(part: dict[str, Any], target: str, tmp_path: Path) -> None:
    resolved = resolve(tmp_path, "tiny.yaml")
    trainer = resolved.experiment.trainer
    changed = replace(resolved.experiment, trainer=replace(trainer, model=replace(trainer.model, **part)))
    with pytest.raises(UsageError, match=f"^{list(part)[-1]}: "):
        format_foreign_file(target, replace(resolved, experiment=changed), None)


@pytest.mark.parametrize("preset", ["llama3.1_8B", "qwen2.5_7B", "qwen3_8B", "mixtral_8x7B_v0.1", "deepseek_v2_lite"])
def test_an_experiment_survives_the_way_to_megatron_and_back(preset: str, tmp_path: Path) -> None:
    resolved = resolve(tmp_path, f"{preset}.yaml")
    script = tmp_path / "train.sh"
    script.write_text(format_foreign_file("megatron-lm", resolved, preset).text)
    config = read_foreign_file(script, {})
    trainer = resolved.experiment.trainer
    assert count_parameters(make_model(config)) == count_parameters(trainer.model)
    said_otherwise = {"eval_interval", "eval_iters", "lr_decay_iters", "optimizer"}
    for group in (trainer.optimizer, trainer.parallel, trainer.training):
        for key in config.settings.keys() & set(group.__struct_fields__) - said_otherwise:
            assert config.settings[key] == getattr(group, key), key


MEGATRON = os.environ.get("PRIMUS_TEST_MEGATRON_CHECKOUT", "")


@pytest.mark.skipif(not MEGATRON, reason="PRIMUS_TEST_MEGATRON_CHECKOUT names no checkout of Megatron-LM")
@pytest.mark.parametrize("preset", ["llama3.1_8B", "qwen3_8B", "mixtral_8x7B_v0.1", "deepseek_v3", "gpt_oss_20B"])
def test_megatrons_own_parser_takes_the_exported_arguments(preset: str, tmp_path: Path) -> None:
    change = ["--rope_type", "default"] if preset.startswith("gpt") else []
    script = export(tmp_path, "megatron-lm", "train.sh", f"{preset}.yaml", *change)
    program = tmp_path / "bin" / "torchrun"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environ = os.environ | {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    words = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, check=True).stdout
    arguments = words.split("pretrain_gpt.py\n")[1].splitlines()
    parse = (
        "import json, sys\nfrom argparse import ArgumentParser\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))\n"
        "args = parser.parse_args(sys.argv[1:])\n"
        "print(json.dumps({k: v for k, v in vars(args).items() if isinstance(v, (int, float, str, bool))}))\n"
    )
    environ = os.environ | {"PYTHONPATH": f"{MEGATRON}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", parse, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    args = json.loads(done.stdout.splitlines()[-1])
    model = load_model(preset)
    assert args["num_layers"] == model.num_layers
    assert args["layernorm_epsilon"] == model.norm_epsilon
    assert args["add_bias_linear"] is model.add_bias_linear
    assert args["untie_embeddings_and_output_weights"] is model.untie_embeddings_and_output_weights


STEPS = """
import importlib.util, os, socket, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torch
torch._utils._get_available_device_type = lambda: "cpu"
from collections import namedtuple
from torchtitan.components import metrics
from torchtitan.distributed import utils
from torchtitan.models.common.attention import ScaledDotProductAttention

class Memory:
    NAMES = "max_active_gib max_active_pct max_reserved_gib max_reserved_pct num_alloc_retries num_ooms"
    Stats = namedtuple("Stats", NAMES)
    device_name = "cpu"
    def get_peak_stats(self): return self.Stats(0.0, 0.0, 0.0, 0.0, 0, 0)
    def reset_peak_stats(self): pass

metrics.build_device_memory_monitor = Memory
utils.set_pg_timeouts = lambda *args, **kwargs: None

def train_two_steps(file):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    spec = importlib.util.spec_from_file_location("exported", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported"] = module
    spec.loader.exec_module(module)
    module.make_inner_attention = ScaledDotProductAttention.Config
    config = module.experiment()
    config.training.disable_cuda_graphs = True
    config.training.steps = 2
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = False
    trainer = config.build()
    losses = []
    log = trainer.metrics_processor.log
    def record(step, loss, *args, **kwargs):
        losses.append(loss)
        return log(step, loss, *args, **kwargs)
    trainer.metrics_processor.log = record
    trainer.train()
    print("TRAINED", sum(p.numel() for p in trainer.model_parts[0].parameters()), *losses)
    trainer.close()
    torch.distributed.destroy_process_group()

for file in sys.argv[1:]:
    train_two_steps(file)
"""


@pytest.mark.slow
@pytest.mark.engine("torchtitan")
def test_torchtitan_takes_two_steps_with_the_exported_modules(tmp_path: Path) -> None:
    data = ["--mock_data", "false", "--train_data_path", str(write_tokens(tmp_path))]
    presets = {"llama3.1_8B": [*SMALL, *data], "qwen2.5_0.5B": SMALL, "qwen3_0.6B": SMALL}
    modules = [
        str(export(tmp_path, "torchtitan", f"{preset}.py", f"{preset}.yaml", *overrides))
        for preset, overrides in presets.items()
    ]
    done = subprocess.run(
        [engine_python("torchtitan"), "-c", STEPS, *modules], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trained = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("TRAINED ")]
    for preset, (num_parameters, *losses) in zip(presets, trained, strict=True):
        model = resolve(tmp_path, f"{preset}.yaml", *SMALL).experiment.trainer.model
        assert int(num_parameters) == count_parameters(model).total_parameters
        assert len(losses) == 2
        assert all(3 < float(loss) < 15 for loss in losses), "of random weights; ln 256 is 5.5"


def write_tokens(folder: Path) -> Path:
    """Token files of Megatron-LM with one document."""
    import struct

    prefix = folder / "text_document"
    tokens = [(7 * index) % 256 for index in range(4000)]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<i", len(tokens))
    prefix.with_suffix(".idx").write_bytes(index + struct.pack("<q", 0) + struct.pack("<qq", 0, 1))
    return prefix


@pytest.mark.parametrize("preset", ["llama3.1_8B", "qwen3_30B_A3B", "deepseek_v2_lite", "llama_quickstart"])
def test_an_experiment_survives_the_way_to_maxtext_and_back(preset: str, tmp_path: Path) -> None:
    resolved = resolve(tmp_path, f"{preset}.yaml", "--lr_warmup_iters", "4")
    file = tmp_path / "train.yml"
    file.write_text(format_foreign_file("maxtext", resolved, None).text)
    config = read_foreign_file(file, {})
    trainer = resolved.experiment.trainer
    assert count_parameters(make_model(config)) == count_parameters(trainer.model)
    assert config.settings["train_iters"] == 20
    assert config.settings["lr"] == trainer.optimizer.lr
    assert config.settings["min_lr_ratio"] == pytest.approx(0.1)
    assert config.settings["lr_warmup_fraction"] == pytest.approx(0.2)
    written = yaml.safe_load(file.read_text())
    assert (written["dataset_type"], written["hardware"]) == ("synthetic", "gpu")
    layout = ("--tensor_model_parallel_size", "4", "--micro_batch_size", "2", "--global_batch_size", "8")
    file.write_text(format_foreign_file("maxtext", resolve(tmp_path, f"{preset}.yaml", *layout), None).text)
    assert yaml.safe_load(file.read_text())["per_device_batch_size"] == 0.5
    assert read_foreign_file(file, {}).settings["micro_batch_size"] == 2
    text = format_foreign_file("maxtext", resolve(tmp_path, f"{preset}.yaml", "--device", "cpu"), None).text
    assert "hardware: cpu" in text and "skip_jax_distributed_system: true" in text


@pytest.mark.parametrize(
    ("target", "words", "written"),
    [
        ("megatron-lm", "--lr_decay_style WSD --lr_warmup_iters 5", ["--lr-wsd-decay-iters 3", "--lr-warmup-iters 5"]),
        ("megatron-lm", "--lr_warmup_fraction 0.13", ["--lr-warmup-iters 2"]),
        ("megatron-lm", "--num_experts 4 --moe_layer_freq 2 --num_layers 4", ["--moe-layer-freq '[0,1,0,1]'"]),
        ("torchtitan", "--lr_decay_style WSD --lr_warmup_iters 5", ["decay_ratio=0.15"]),
        ("torchtitan", "--lr_decay_style constant", ["min_lr_factor=1.0"]),
        ("maxtext", "--lr_decay_style WSD", ["lr_schedule_type: wsd", "wsd_decay_steps_fraction: 0.15"]),
        ("maxtext", "--lr_decay_style constant", ["learning_rate_final_fraction: 1.0"]),
        ("maxtext", "--use_distributed_optimizer false", ["ici_fsdp_parallelism: 1", "ici_data_parallelism: -1"]),
        ("maxtext", "--lr 0.001", ["enable_checkpointing: true", "checkpoint_period: 20"]),
        ("maxtext", "--disable_last_saving true", ["enable_checkpointing: false"]),
        ("maxtext", "--weight_decay 0.2", ["adam_weight_decay: 0.2", "adamw_mask"]),
    ],
)
def test_an_export_writes_what_primus_does(target: str, words: str, written: list[str], tmp_path: Path) -> None:
    text = export(tmp_path, target, "file", "llama3.1_8B.yaml", *words.split()).read_text()
    assert not [each for each in written if each not in text]


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_maxtext_gets_the_steps_of_each_schedule(style: str, tmp_path: Path) -> None:
    for warmup, end in ((0, 7), (29, 100), (3, 58), (1, 49)):
        words = f"--lr_decay_style {style} --lr_warmup_iters {warmup} --train_iters {end}".split()
        optimizer = resolve(tmp_path, "tiny.yaml", *words).experiment.trainer.optimizer
        file = export(tmp_path, "maxtext", "train.yml", "tiny.yaml", *words)
        exported = yaml.safe_load(file.read_text())
        settings = read_foreign_file(file, {}).settings
        assert int(end * exported["warmup_steps_fraction"]) == warmup
        assert settings["lr_decay_style"] == style
        assert exported["eval_interval"] == -1
        if style != "cosine":
            decay = count_wsd_decay_steps(optimizer, end) if style == "WSD" else end - warmup
            assert int(end * exported["wsd_decay_steps_fraction"]) == decay
            assert exported["wsd_decay_steps_fraction"] + exported["warmup_steps_fraction"] <= 1


@pytest.mark.parametrize(
    ("target", "words", "lost"),
    [
        ("megatron-lm", "--load hf:some/model", "load: hf:some/model: `checkpoint convert` it"),
        ("megatron-lm", "--vocab_size 257 --tensor_model_parallel_size 2", "vocab_size: 257: Megatron-LM rounds it up"),
        ("torchtitan", "--use_distributed_optimizer false", "data_parallel_replicate_degree"),
        ("torchtitan", "--lr_decay_iters 10", "lr_decay_iters: 10: after these steps"),
        ("maxtext", "--lr_decay_iters 10", "sets the learning rate to 0"),
        ("maxtext", "--rotary_scaling_factor 32", "rotary_scaling_factor: 32.0: MaxText scales rope with 8"),
    ],
)
def test_what_another_framework_does_otherwise_is_said(target: str, words: str, lost: str, tmp_path: Path) -> None:
    text = export(tmp_path, target, "file", "llama3.1_8B.yaml", *words.split()).read_text()
    assert lost in text
    assert "--load hf:" not in text


@pytest.mark.parametrize("path", ["a", "0.3 a 0.7 b", "a b"])
def test_maxtext_gets_the_files_and_weights_of_the_data(path: str, tmp_path: Path) -> None:
    words = ("--mock_data", "false", "--train_data_path", path, "--eval_interval", "5")
    file = export(tmp_path, "maxtext", "train.yml", "tiny.yaml", *words)
    assert "eval_interval: 5: MaxText splits off no data" in file.read_text()
    written = yaml.safe_load(file.read_text())
    assert (written["grain_train_files"], written["eval_interval"]) == (
        {"a": "a", "0.3 a 0.7 b": "a,0.3;b,0.7", "a b": "a;b"}[path],
        -1,
    )
    read = read_foreign_file(file, {}).settings["train_data_path"]
    assert read == {"a": "a", "0.3 a 0.7 b": [0.3, "a", 0.7, "b"], "a b": ["a", "b"]}[path]
    file = export(tmp_path, "maxtext", "train.yml", "tiny.yaml", *words, "--valid_data_path", "v")
    written = yaml.safe_load(file.read_text())
    assert (written["grain_eval_files"], written["eval_interval"]) == ("v", 5)
    assert read_foreign_file(file, {}).settings["valid_data_path"] == "v"


def test_several_data_files_and_constants_of_yarn_are_said_to_be_lost(tmp_path: Path) -> None:
    blend = ("--mock_data", "false", "--train_data_path", "0.3 a 0.7 b")
    assert "only the first file" in export(tmp_path, "torchtitan", "file", "tiny.yaml", *blend).read_text()
    text = export(tmp_path, "megatron-lm", "file", "deepseek_v3.yaml", "--beta_fast", "16").read_text()
    assert "beta_fast: 16.0: Megatron-LM scales rope with 32.0" in text


def test_megatron_builds_the_vocabulary_of_the_model_not_of_its_tokenizer(tmp_path: Path) -> None:
    words = ("--mock_data", "false", "--train_data_path", "a", "--tokenizer_model", "Qwen/Qwen2.5-7B")
    file = export(tmp_path, "megatron-lm", "file.sh", "qwen2.5_7B.yaml", *words, "--tensor_model_parallel_size", "2")
    assert "--make-vocab-size-divisible-by 76032" in file.read_text(), "half of the model's 152064"
    assert make_model(read_foreign_file(file, {})).vocab_size == 152064


@pytest.mark.parametrize("target", ["torchtitan", "maxtext", "megatron-lm"])
def test_a_setting_that_is_lost_is_a_warning_and_a_comment(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(EXPERIMENT.format(model="tiny.yaml"))
    words = ["--loss_spike_policy", "skip"] if target == "torchtitan" else ["--dataset", "python-stdlib"]
    words += ["--tokenizer_type", "ByteLevelBPE"]
    output = tmp_path / "new" / "train"
    command = ["config", "export", "--config", str(file), "--to", target, "--output", str(output)]
    assert main(["direct", "--", *command, *words]) == 0
    key = words[0].removeprefix("--")
    assert f"{key}: {words[1]}" in capsys.readouterr().err
    assert f"#   {key}: {words[1]}" in output.read_text()


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(EXPERIMENT.format(model="tiny.yaml"))
    command = ["direct", "--", "config", "export", "--config", str(file), "--to", "huggingface", "--output", str(file)]
    assert main(command) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert file.read_text().startswith("workspace")


def test_every_preset_is_exported_to_hugging_face_or_refused_with_a_reason() -> None:
    problems = {}
    names = registry.list_plug_ins("models")
    for name in names:
        try:
            format_model_config(load_model(name))
        except UsageError as error:
            problems[name] = error.problem
    assert not [problem for problem in problems.values() if " has " not in problem]
    assert len(names) - len(problems) >= 50

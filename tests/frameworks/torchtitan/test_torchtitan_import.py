"""Configurations of torchtitan, TOML and Python, become experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.cli.main import main
from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.write_file import format_result, replace_values
from primus.config.load import load_experiment
from primus.errors import UsageError
from primus.experiment import resolve_experiment
from primus.frameworks.torchtitan.names import DEBUG_MODELS

TOML = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "assets/llama"
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.2
min_lr_factor = 0.1
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[checkpoint]
enable = true
interval = 250
async_mode = "async"
[activation_checkpoint]
mode = "full"
[float8]
enable_fsdp_float8_all_gather = false
[mystery]
key = 3
"""
OLD = """\
[model]
name = "llama3"
flavor = "debugmodel"
tokenizer_path = "t.model"
[training]
batch_size = 4
compile = true
data_parallel_shard_degree = 1
[checkpoint]
enable_checkpoint = false
"""
PYTHON = '''
"""Two configurations."""
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

STEPS = 3


def base() -> Trainer.Config:
    model_spec = model_registry("0.6B")
    return Trainer.Config(
        loss=Loss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        model_spec=model_spec,
        hf_assets_path="./assets",
        optimizer=default_adamw(lr=8e-4, weight_decay=0.2, betas=(0.8, 0.9)),
        training=TrainingConfig(local_batch_size=8, seq_len=2 * 1024, steps=10),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(interval=10, enable=True),
        activation_checkpoint=FullAC.Config(),
    )


def longer() -> Trainer.Config:
    config = base()
    config.training.steps = 100
    config.parallelism.context_parallel_degree = 2
    config.training.seq_len = compute_length()
    return config
'''


def read_text(folder: Path, name: str, text: str, function: str | None = None) -> ForeignConfig:
    file = folder / name
    file.write_text(text)
    return read_foreign_file(file, {}, function)


def test_settings_get_the_keys_of_primus(tmp_path: Path) -> None:
    config = read_text(tmp_path, "a.toml", TOML)
    for key, value in {
        "model": "llama3.1_8B",
        "workspace": "./outputs",
        "train_iters": 1000,
        "micro_batch_size": 1,
        "seq_length": 8192,
        "dataset": "c4",
        "tokenizer_model": "assets/llama",
        "lr_decay_style": "WSD",
        "lr_wsd_decay_iters": 200,
        "min_lr_ratio": 0.1,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "save_interval": 250,
        "async_save": True,
        "recompute_activations": True,
        "use_distributed_optimizer": True,
    }.items():
        assert config.settings[key] == value, key
    assert [each.key for each in config.warnings] == ["model.flavor", "mystery.key"]
    assert config.settings["backend_args"] == {"parallelism": {"pipeline_parallel_schedule": "Interleaved1F1B"}}


def test_names_of_older_releases_are_known(tmp_path: Path) -> None:
    config = read_text(tmp_path, "a.toml", OLD)
    assert config.settings["micro_batch_size"] == 4
    assert config.settings["compile"] is True
    assert config.settings["tokenizer_model"] == "t.model"
    assert config.settings["use_distributed_optimizer"] is False
    assert config.model["num_layers"] == 6


LLAMA3 = '[model]\nname = "llama3"\nflavor = "{}"\n[training]\nlocal_batch_size = 2\n{}\n'
"""A flavor of Llama 3, and further settings that say how old the file is."""


@pytest.mark.parametrize(
    ("flavor", "rest", "rope", "told"),
    [
        ("70B", "[compile]\nenable = true\n[validation]\nenabled = false", "default", "before 2025-10-08"),
        ("405B", "[lr_scheduler]\nlr_min = 0.1", "default", "lr_scheduler.lr_min is of a torchtitan before"),
        ("debugmodel", "warmup_steps = 3", "default", "training.warmup_steps is of a torchtitan before"),
        ("70B", "[debug]\nseed = 5", "llama3", ""),
        ("8B", "[compile]\nenable = true", "llama3", "a torchtitan before 2025-10-08 did not"),
        ("3B", "[debug]\nseed = 5", "llama3", "your repository's own"),
    ],
)
def test_a_flavor_is_the_model_of_the_release_that_the_file_was_written_for(
    flavor: str, rest: str, rope: str, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(LLAMA3.format(flavor, rest))
    resolved = load_experiment(file, environ={})
    assert resolved.experiment.trainer.model.rope_type == rope
    lines = [note for note in resolved.notes if "model.flavor" in note]
    assert (told in " ".join(lines)) if told else not lines


@pytest.mark.parametrize(("flavor", "chunk", "every"), [("17bx128e", None, None), ("17bx128e_irope", 8192, 4)])
def test_llama4_has_chunked_attention_only_in_flavors_that_say_so(
    flavor: str, chunk: int | None, every: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(LLAMA3.format(flavor, "").replace("llama3", "llama4"))
    model = load_experiment(file, environ={}).experiment.trainer.model
    assert (model.attention_chunk_size, model.no_rope_freq) == (chunk, every)


def test_settings_of_the_first_releases_keep_their_values(tmp_path: Path) -> None:
    text = """\
[model]
name = "llama2"
flavor = "13B"
norm_type = "layernorm"
tokenizer_path = "own/bpe.model"
[training]
warmup_steps = 17
[checkpoint]
interval_type = "steps"
[float8]
enable_float8_linear = true
"""
    config = read_text(tmp_path, "a.toml", text)
    assert (config.settings["lr_warmup_iters"], config.settings["fp8"]) == (17, "e4m3")
    assert config.settings["model"] == "llama2_13B"
    assert [each.key for each in config.warnings if each.key.startswith("model.")] == [
        "model.tokenizer_path",
        "model.norm_type",
    ]
    assert "checkpoint.interval_type" not in [each.key for each in config.warnings]


def test_a_batch_that_counts_tokens_becomes_sequences(tmp_path: Path) -> None:
    counts = "num_tokens_per_microbatch_per_dp_rank=3 * 512, max_context_length=512, num_tokens_per_train_step=6144"
    packed = "dataloader=GrainDataLoader.Config(dataset=ConcatThenSplitPackingConfig(dataset=DATASETS['c4']))"
    text = PYTHON.replace("local_batch_size=8, seq_len=2 * 1024", counts)
    text = text.replace('dataloader=HuggingFaceTextDataLoader.Config(dataset="c4")', packed)
    config = read_text(tmp_path, "configs.py", text, "base")
    found = [config.settings[key] for key in ("micro_batch_size", "seq_length", "global_batch_size", "dataset")]
    assert found == [3, 512, 12, "c4"]
    assert [each.reason for each in config.warnings] == [
        "written for a torchtitan after 0.3, which packs tokens: 1536 tokens become 3 x 512"
    ]


def test_tokens_that_are_not_whole_sequences_are_named(tmp_path: Path) -> None:
    counts = "num_tokens_per_microbatch_per_dp_rank=1500, max_context_length=512, num_tokens_per_train_step=700"
    text = PYTHON.replace("local_batch_size=8, seq_len=2 * 1024", counts)
    config = read_text(tmp_path, "configs.py", text, "base")
    assert (config.settings["micro_batch_size"], config.settings["global_batch_size"]) == (2, 1)
    assert [each.key for each in config.warnings if "differs" in each.reason] == [
        "training.num_tokens_per_microbatch_per_dp_rank",
        "training.num_tokens_per_train_step",
    ]


def test_a_pipeline_after_0_3_sums_up_its_passes(tmp_path: Path) -> None:
    counts = "num_tokens_per_microbatch_per_dp_rank=1024, max_context_length=512, num_tokens_per_train_step=8192"
    parallel = "parallelism=ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4)"
    text = PYTHON.replace("local_batch_size=8, seq_len=2 * 1024", counts)
    text = text.replace("activation_checkpoint=FullAC.Config()", parallel)
    config = read_text(tmp_path, "configs.py", text, "base")
    assert (config.settings["micro_batch_size"], config.settings["global_batch_size"]) == (2, 16)


@pytest.mark.parametrize(("stages", "is_split"), [(1, False), (2, True), (4, True)])
def test_a_pipeline_after_0_3_without_a_global_batch_is_told(stages: int, is_split: bool, tmp_path: Path) -> None:
    counts = "num_tokens_per_microbatch_per_dp_rank=1024, max_context_length=512"
    parallel = f"parallelism=ParallelismConfig(pipeline_parallel_degree={stages}, num_pp_microbatches=4)"
    text = PYTHON.replace("local_batch_size=8, seq_len=2 * 1024", counts)
    text = text.replace("activation_checkpoint=FullAC.Config()", parallel)
    config = read_text(tmp_path, "configs.py", text, "base")
    assert config.settings["micro_batch_size"] == 2
    told = [each.reason for each in config.warnings if each.key == "parallelism.pipeline_parallel_microbatch_size"]
    assert bool(told) == is_split
    assert all("global size depends on the devices" in each for each in told)


def test_defaults_that_the_file_does_not_state_are_listed(tmp_path: Path) -> None:
    text = " ".join(format_result(read_text(tmp_path, "a.toml", OLD)).replace("#", "").split())
    listed = text.partition("defaults of torchtitan: ")[2]
    assert "seq_length 2048, " in listed.partition("work_group")[0]
    assert "micro_batch_size" not in listed.partition("work_group")[0]


def test_a_default_of_an_earlier_release_that_is_gone_is_listed(tmp_path: Path) -> None:
    text = """[model]
name = "llama3"
flavor = "8B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[comm]
init_timeout_seconds = 300
"""
    config = read_text(tmp_path, "a.toml", text)
    assert [each.key for each in config.others].count("activation_checkpoint.selective_ac_option") == 1
    assert config.unchanged == ["comm.init_timeout_seconds"]


def test_a_function_of_python_is_read_without_running_it(tmp_path: Path) -> None:
    config = read_text(tmp_path, "configs.py", PYTHON, "base")
    for key, value in {
        "model": "qwen3_0.6B",
        "lr": 8e-4,
        "weight_decay": 0.2,
        "adam_beta1": 0.8,
        "seq_length": 2048,
        "dataset": "c4",
        "save_interval": 10,
        "recompute_activations": True,
    }.items():
        assert config.settings[key] == value, key
    assert config.warnings == []


def test_changes_of_another_functions_result_are_followed(tmp_path: Path) -> None:
    config = read_text(tmp_path, "configs.py", PYTHON, "longer")
    assert config.settings["train_iters"] == 100
    assert config.settings["context_parallel_size"] == 2
    assert [each.value for each in config.warnings] == ["compute_length()"]


@pytest.mark.parametrize("function", ["base", "longer"])
def test_the_result_is_a_valid_experiment(function: str, tmp_path: Path) -> None:
    result = tmp_path / "e.yaml"
    result.write_text(format_result(read_text(tmp_path, "configs.py", PYTHON, function)))
    changes = () if function == "base" else ("--context_parallel_size", "1")
    assert resolve_experiment(result, changes, {}).experiment.trainer.framework == "torchtitan"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", TOML[:60], "not TOML"),
        ("a.toml", "[tool.ruff]\nline-length = 3\n", "not a file that primus can import (it has tool)"),
        ("a.py", PYTHON, "it has 2 configurations: base, longer"),
        (
            "a.py",
            PYTHON + "\n\ndef _part() -> Trainer.Config:\n    return base()\n",
            "it has 2 configurations: base, longer",
        ),
        ("a.py", "import torchtitan\ndef f(:\n", "a.py:2: not Python"),
        ("a.py", "import torchtitan\nX = 1\n", "no function returns a torchtitan configuration"),
        ("a.py", "X = 1\n", "not a file that primus can import"),
        ("a.yaml", "modules: {}\n", "this is an experiment file already"),
        ("a.yaml", "recipe: x\ntrainer: {}\n", "a recipe of NeMo"),
        ("a.yaml", "x: 1\n", "not a file that primus can import"),
        ("a.txt", "x", "not a file that primus can import"),
    ],
)
def test_a_file_of_another_kind_is_refused(name: str, text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_text(tmp_path, name, text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("8B", "9B", "model.flavor 9B: no preset of llama3; known: 1B, 3B"),
        ("llama3", "olmo", "model.name olmo: has no"),
    ],
)
def test_a_model_without_a_preset_leaves_the_rest_to_one_that_the_user_names(
    old: str, new: str, told: str, tmp_path: Path
) -> None:
    config = read_text(tmp_path, "a.toml", TOML.replace(old, new))
    with pytest.raises(UsageError) as caught:
        format_result(config)
    assert told in str(caught.value) and "--model NAME" in caught.value.hint
    replace_values(config, {"model": "llama3_8B"})
    assert "model: llama3_8B.yaml" in format_result(config) and config.settings["seq_length"] == 8192


def test_a_toml_trains_as_it_is_with_notes_on_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(TOML)
    resolved = load_experiment(Path("mine.toml"), ["--train_iters", "7", "--framework", "torchtatin"], environ={})
    assert resolved.experiment.exp_name == "mine"
    assert resolved.experiment.trainer.framework == "torchtitan"
    assert resolved.experiment.trainer.training.train_iters == 7
    assert resolved.origins["lr"] == "mine.toml"
    assert any("mystery.key" in note for note in resolved.notes)
    assert any("'torchtatin' is read as torchtitan" in note for note in resolved.notes)
    assert main(["direct", "--", "config", "check", "--config", "mine.toml"]) == 0
    assert "mystery.key" in capsys.readouterr().out


def test_another_toml_is_no_experiment(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[tool]\nx = 1\n")
    with pytest.raises(UsageError, match="not a file that primus can import \\(it has tool\\)"):
        load_experiment(file, environ={})


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("steps = 1000", 'steps = "many"', "training.steps: expected a number, found 'many'"),
        ("seq_len = 8192", "seq_len = [8192]", "training.seq_len: expected a number"),
        ("decay_ratio = 0.2", "decay_ratio = inf", "lr_scheduler.decay_ratio: expected a number"),
        ("enable = true", "enable = true\nkeep_latest_k = false", "checkpoint.keep_latest_k: expected a number"),
    ],
)
def test_a_value_of_another_type_is_named(old: str, new: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        format_result(read_text(tmp_path, "a.toml", TOML.replace(old, new)))
    assert told in str(caught.value)


def test_a_value_in_the_place_of_a_section_is_listed(tmp_path: Path) -> None:
    config = read_text(tmp_path, "a.toml", "optimizer = 3\n" + TOML.replace("[optimizer]\nlr = 3e-4", ""))
    assert "optimizer" in [each.key for each in config.warnings]


@pytest.mark.parametrize(("family", "flavor"), DEBUG_MODELS)
def test_torchtitan_trains_each_of_its_small_flavors(tmp_path: Path, family: str, flavor: str) -> None:
    source, result = tmp_path / "titan.toml", tmp_path / "e.yaml"
    source.write_text(OLD.replace('"llama3"', f'"{family}"').replace('"debugmodel"', f'"{flavor}"'))
    result.write_text(format_result(read_foreign_file(source, {})))
    resolve_experiment(result, ("--compile", "false"), {})


CHECKPOINT = '[model]\nname = "llama3"\nflavor = "8B"\nhf_assets_path = "./weights"\n[checkpoint]\n'


@pytest.mark.parametrize(
    ("written", "loaded"),
    [
        ('enable = true\ninitial_load_path = "/w"\ninitial_load_in_hf = true', "hf:/w"),
        ("enable = true\ninitial_load_in_hf = true", "hf:./weights"),
        ("enable = true", None),
        # as torchtitan-npu/torchtitan-npu has it: CheckpointManager.load reads nothing without `enable`
        ('enable = false\ninitial_load_path = "/w"\ninitial_load_in_hf = true', None),
    ],
)
def test_weights_are_loaded_where_torchtitan_loads_them(written: str, loaded: str | None, tmp_path: Path) -> None:
    settings = read_text(tmp_path, "a.toml", CHECKPOINT + written).settings
    assert (settings.get("load"), settings.get("finetune")) == (loaded, True if loaded else None)


@pytest.mark.parametrize(
    "model", ['backbone = "dinov3_vitl16_3D"', 'config = "fla-hub/transformer-1.3B-100B"']
)  # eminorhan/torchtitan-segmentation, fla-org/flame
def test_a_fork_that_names_its_model_otherwise_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"names no model of torchtitan, and has model.{model.split()[0]}"):
        read_text(tmp_path, "a.toml", f"[model]\n{model}\n[training]\nsteps = 9\n")


def test_a_file_without_a_model_trains_the_small_one_and_says_so(tmp_path: Path) -> None:
    config = read_text(tmp_path, "a.toml", "[training]\nsteps = 9\n")
    assert config.model["num_layers"] == 6
    assert ("model.flavor", None) in [(each.key, each.value) for each in config.warnings]


@pytest.mark.parametrize(("seconds", "minutes", "is_told"), [(3, 1, True), (60, 1, False), (61, 2, True)])
def test_a_timeout_in_seconds_that_is_rounded_is_told(
    seconds: int, minutes: int, is_told: bool, tmp_path: Path
) -> None:
    name = "comm.train_timeout_seconds"
    config = read_text(tmp_path, "a.toml", f"{TOML}\n[comm]\ntrain_timeout_seconds = {seconds}\n")
    assert config.settings["distributed_timeout_minutes"] == minutes
    assert (name in [each.key for each in config.warnings]) == is_told


def test_converters_of_a_trainer_are_those_of_the_model(tmp_path: Path) -> None:
    """As llama3_405b in torchtitan/models/llama3/config_registry.py of jpli02/torchtitan."""
    converter = 'Float8LinearConverter.Config(filter_fqns=["output"])'
    text = PYTHON.replace(
        "        loss=",
        f"        model_converters=ModelConvertersContainer.Config(converters=[{converter}]),\n        loss=",
    )
    config = read_text(tmp_path, "a.py", text, "base")
    assert config.settings["fp8"] == "e4m3"
    assert "quantize.linear.float8.filter_fqns" in [each.key for each in config.others]


def test_fine_tuning_on_conversations_is_another_task(tmp_path: Path) -> None:
    """As sft_qwen3_8b_math in torchtitan/models/qwen3/config_registry.py of jpli02/torchtitan."""
    config = read_text(tmp_path, "a.py", PYTHON.replace("HuggingFaceTextDataLoader", "ChatDataLoader"), "base")
    assert ("dataloader", "ChatDataLoader") in [(each.key, each.value) for each in config.warnings]

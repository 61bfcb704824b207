"""What a script leaves out is what the `arguments.py` of its own checkout says."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.launch_line import find_launches
from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.write_file import format_result
from primus.errors import UsageError
from primus.frameworks.megatron.checkout_defaults import FILES, LARGEST_FILE
from primus.frameworks.megatron.import_file import MegatronFlags

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 --vocab-size 96"
PARSER = """\
def _add_regularization_args(parser):
    group = parser.add_argument_group(title='regularization')
    group.add_argument('--attention-dropout', type=float, default=0.0)
    group.add_argument('--weight-decay', type=float, default=0.03)
    group.add_argument('--normalization', default='layernorm')
    group.add_argument('--num-workers', type=int, default=7)
    group.add_argument('--num-experts', type=int, nargs='+', default=[1])
    group.add_argument('--rotary-base', '--rope-theta', type=int, default=500000)
    group.add_argument('--transformer-impl', default='local')
    group.add_argument('--no-load-balance', action='store_false', dest='load_balance')
    group.add_argument('--goldfish-k', type=int, default=50)
    group.add_argument('--goldfish-loss', action='store_true')
    group.add_argument('--wandb-project', default='')
    group.add_argument('--seed', type=int, default=make_seed())
    group.add_argument('--apply-query-key-layer-scaling', action='store_false')
"""


def read(folder: Path, flags: str = "", parser: str = PARSER, file: str = FILES[0]) -> ForeignConfig:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(parser)
    target = ForeignConfig(origin="a script", name="script", framework="megatron", folders=(folder / "jobs", folder))
    launch = find_launches([["pretrain_gpt.py", *f"{SHAPE} {flags}".split()]]).launches[0]
    MegatronFlags({name: list(values) for name, values in launch.arguments.items()}, target).translate()
    return target


@pytest.mark.parametrize("file", FILES)
def test_defaults_of_the_checkout_replace_those_of_the_release(file: str, tmp_path: Path) -> None:
    found = read(tmp_path, file=file)
    values = found.model | found.settings
    expected = {"weight_decay": 0.03, "num_workers": 7, "rotary_base": 500000, "apply_query_key_layer_scaling": True}
    assert {key: values.get(key) for key in expected} == expected
    assert not {"num_experts", "seed", "wandb_project"} & {*values}
    warnings = {each.key for each in found.warnings}
    assert {"--normalization (absent)", "--hidden-dropout (absent)"} <= warnings
    assert "--attention-dropout (absent)" not in warnings


def test_an_argument_of_the_script_replaces_the_default_of_the_checkout(tmp_path: Path) -> None:
    found = read(tmp_path, "--weight-decay 0.2 --rope-theta 10000 --num-workers 3")
    assert [found.settings["weight_decay"], found.settings["num_workers"]] == [0.2, 3]
    assert found.model["rotary_base"] == 10000


def test_defaults_that_primus_does_not_know_are_listed(tmp_path: Path) -> None:
    others = [(each.key, each.reason) for each in read(tmp_path).others if str(tmp_path) in each.key]
    assert others == [
        (str(tmp_path / FILES[0]), ""),
        (str(tmp_path / FILES[0]), "has defaults of its own: load_balance True, goldfish_k 50"),
    ]
    listed = next(each.value for each in read(tmp_path).others if str(tmp_path) in each.key)
    assert listed == "its defaults: transformer_impl local, attention_dropout 0.0"


@pytest.mark.parametrize("parser", ["def broken(:\n", "#" * (LARGEST_FILE + 1)])
def test_a_parser_that_cannot_be_read_is_as_one_that_is_not_here(parser: str, tmp_path: Path) -> None:
    found = read(tmp_path, parser=parser)
    assert "not here" in {each.key: each.reason for each in found.warnings}[FILES[0]]
    assert found.settings["weight_decay"] == 0.01


def test_a_script_without_its_checkout_says_whose_defaults_it_gets(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun pretrain_gpt.py {SHAPE}\n")
    reasons = {each.key: each.reason for each in read_foreign_file(script, {}).warnings}
    assert "core_v0.16.1" in reasons[FILES[0]]


def test_arguments_with_underscores_are_those_of_megatron(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun finetune.py {SHAPE.replace('-', '_').replace('__', '--')} --global_batch_size 4\n")
    found = read_foreign_file(script, {})
    assert (found.model["hidden_size"], found.settings["global_batch_size"]) == (64, 4)


@pytest.mark.parametrize(("stage", "told"), [(1, ""), (2, "gradients too"), (3, "gradients and weights too")])
def test_what_else_a_stage_of_zero_shards_is_told(stage: int, told: str, tmp_path: Path) -> None:
    found = read(tmp_path, f"--deepspeed --zero-stage {stage}")
    reason = next(each.reason for each in found.others if each.key == "--zero-stage")
    assert found.settings["use_distributed_optimizer"] is True
    assert told in reason if told else not reason


def test_the_tokenizer_of_bigcode_is_a_file(tmp_path: Path) -> None:
    found = read(tmp_path, "--tokenizer-type TokenizerFromFile --tokenizer-file /tok/tokenizer.json")
    assert found.settings["tokenizer_model"] == "/tok/tokenizer.json"


def test_experts_that_differ_among_layers_are_told(tmp_path: Path) -> None:
    found = read(tmp_path, "--num-experts 4 4 8 --deepspeed")
    assert found.model["num_experts"] == 8
    reason = next(each.reason for each in found.warnings if each.key == "--num-experts")
    assert "each has 8" in reason
    same = read(tmp_path, "--num-experts 4 4 --deepspeed")
    assert same.model["num_experts"] == 4
    assert "--num-experts" not in {each.key for each in same.warnings}


def test_an_incomplete_shape_says_what_it_depends_on(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"N=$(nvidia-smi -L | wc -l)\ntorchrun pretrain_gpt.py {SHAPE} --num-layers $((N * 3))\n")
    with pytest.raises(UsageError, match=r"num_layers not found \(--num-layers: only a run of the script can tell"):
        format_result(read_foreign_file(script, {}))


@pytest.mark.parametrize(
    ("default", "value", "told"), [("sgd", "sgd", False), ("adamw4", None, True), ("adam", None, False)]
)
def test_an_optimizer_of_the_checkout_is_taken_or_told(
    default: str, value: str | None, told: bool, tmp_path: Path
) -> None:
    parser = f"parser.add_argument('--optimizer', default='{default}', choices=['adam', 'sgd', 'adamw4'])\n"
    found = read(tmp_path, parser=parser)
    assert found.settings.get("optimizer") == value
    assert ["optimizer adamw4" in each.reason for each in found.warnings if str(tmp_path) in each.key] == [True] * told

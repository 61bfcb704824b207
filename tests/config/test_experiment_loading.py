"""An experiment is its file over its presets under the command line, and every value says where it came from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from primus.config.load import Resolved, load_experiment
from primus.config.schema import GROUPS, OWNERS
from primus.config.schema_keys import needs_value
from primus.errors import UsageError

Write = Callable[..., Path]

SMALL = """\
exp_name: small
modules:
  pre_trainer:
    model: tiny.yaml
    overrides:
      mock_data: true
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "exp.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return Path(name)

    return write


def load(file: Path, *overrides: str, **environ: str) -> Resolved:
    return load_experiment(file, overrides, environ=environ)


def module(body: str) -> str:
    """An experiment file whose module holds `body`, whose first line is line 4."""
    return "exp_name: small\nmodules:\n  pre_trainer:\n" + "".join(f"    {line}\n" for line in body.splitlines())


def problem_of(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


# -- where values come from --


def test_each_kind_of_origin_is_told(write: Write) -> None:
    file = write(
        "work_group: ${TEAM:us}\nuser_name: ${WHO}\nenv: {A: 1}\n"
        + module("model: tiny.yaml\nconfig: pre_trainer.yaml\noverrides:\n  mock_data: true\n  seed: ${SEED:5}")
    )
    origins = load(file, "--lr", "1e-4", "env.B=2", WHO="ann").origins
    expected = {
        "work_group": "exp.yaml:1",
        "user_name": "$WHO",
        "env.A": "exp.yaml:3",
        "env.B": "--env.B",
        "model": "exp.yaml:7",
        "framework": "default",
        "num_layers": "preset:tiny.yaml:2",
        "train_iters": "preset:pre_trainer.yaml:2",
        "mock_data": "exp.yaml:10",
        "seed": "exp.yaml:11",
        "lr": "--lr",
        "clip_grad": "default",
        "workspace": "default",
    }
    assert {key: origins[key] for key in expected} == expected


def test_the_command_line_wins_over_the_file_over_the_trainer_preset_over_the_model_preset(write: Write) -> None:
    write(
        "num_layers: 1\nhidden_size: 8\nffn_hidden_size: 8\nnum_attention_heads: 2\nvocab_size: 9\nseq_length: 8",
        "m.yaml",
    )
    write("num_layers: 2\nseq_length: 16\nlr: 1.0e-3\ntrain_iters: 1", "t.yaml")
    file = write(module("model: m.yaml\nconfig: t.yaml\noverrides:\n  seq_length: 32\n  lr: 1.0e-2"))
    trainer = load(file, "--lr=0.1").experiment.trainer
    assert trainer.model.hidden_size == 8
    assert trainer.model.num_layers == 2
    assert trainer.training.train_iters == 1
    assert trainer.training.seq_length == 32
    assert trainer.optimizer.lr == 0.1


# -- extends --


def test_extends_of_a_list_lets_later_files_win_and_the_file_itself_most(write: Write) -> None:
    write("work_group: a\nuser_name: a\nexp_name: a\nenv: {X: a, Y: a}", "a.yaml")
    write("user_name: b\nexp_name: b\nenv: {Y: b}", "b.yaml")
    file = write("extends: [a.yaml, b.yaml]\n" + SMALL.replace("exp_name: small", "exp_name: own"))
    asked = load(file).experiment
    assert (asked.work_group, asked.user_name, asked.exp_name, asked.env) == ("a", "b", "own", {"X": "a", "Y": "b"})


def test_extends_is_followed_from_the_folder_of_the_file_that_names_it(write: Write) -> None:
    write("user_name: far\n", "shared/site/base.yaml")
    write("extends: site/base.yaml\nwork_group: near\n", "shared/team.yaml")
    file = write("extends: ../shared/team.yaml\n" + SMALL, "mine/exp.yaml")
    resolved = load(file)
    assert (resolved.experiment.user_name, resolved.experiment.work_group) == ("far", "near")
    assert resolved.origins["user_name"] == "mine/../shared/site/base.yaml:1"


def test_overrides_merge_through_extends_and_lists_replace(write: Write) -> None:
    write(module("model: tiny.yaml\noverrides:\n  lr: 0.1\n  train_data_path: [0.5, a, 0.5, b]"), "base.yaml")
    file = write("extends: base.yaml\n" + module("overrides:\n  seed: 1\n  train_data_path: [c]"))
    trainer = load(file).experiment.trainer
    assert (trainer.optimizer.lr, trainer.training.seed, trainer.data.train_data_path) == (0.1, 1, ["c"])


def test_a_preset_may_extend_a_shipped_one(write: Write) -> None:
    write("extends: llama3.1_8B.yaml\nnum_layers: 3\n", "mine.yaml")
    spec = load(write(module("model: mine.yaml\noverrides: {mock_data: true}"))).experiment.trainer.model
    assert (spec.num_layers, spec.hidden_size, spec.rope_type) == (3, 4096, "llama3")


def test_a_cycle_of_extends_is_named(write: Write) -> None:
    write("extends: exp.yaml\n", "b.yaml")
    file = write("extends: b.yaml\n" + SMALL)
    assert "extends itself through exp.yaml -> b.yaml" in problem_of(lambda: load(file))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("extends: none.yaml\n", "exp.yaml:1: no such file: none.yaml"),
        ("extends: 3\n", "exp.yaml:1: expected the name of a file, got 3"),
        ("extends: [[a]]\n", "exp.yaml:1: expected the name of a file, got ['a']"),
        ("extends: {a: b}\n", "exp.yaml:1: 'extends' must be a file name or a list of them"),
    ],
)
def test_a_wrong_extends_is_named_with_its_line(write: Write, text: str, problem: str) -> None:
    assert problem_of(lambda: load(write(text + SMALL))) == problem


@pytest.mark.parametrize("text", ["extends:\n", "extends: []\n"])
def test_an_empty_extends_extends_nothing(write: Write, text: str) -> None:
    assert load(write(text + SMALL)).experiment.exp_name == "small"


# -- what is wrong --


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("exp_nam: x\n" + SMALL, "exp.yaml:1: unknown key 'exp_nam' in the experiment file", "'exp_name'"),
        ("lr: 1\n" + SMALL, "exp.yaml:1: unknown key 'lr' in the experiment file", "under 'overrides:'"),
        (
            module("model: tiny.yaml\nmodell: x"),
            "exp.yaml:5: unknown key 'modell' in the module 'pre_trainer'",
            "'model'",
        ),
        (module("model: tiny.yaml\nlr: 1"), "exp.yaml:5: unknown key 'lr' in the module 'pre_trainer'", "'overrides:'"),
        (
            module("model: tiny.yaml\noverrides:\n  lrr: 1"),
            "exp.yaml:6: unknown key 'lrr'; did you mean 'lr'?",
            "backend_args",
        ),
        (
            module("model: tiny.yaml\noverrides:\n  training: {lr: 1}"),
            "exp.yaml:6: unknown key 'training'; keys stand",
            "",
        ),
        ("modules:\n  pretrainer: {model: tiny}\n", "exp.yaml:2: unknown module 'pretrainer'", "'pre_trainer'"),
        ("modules: 3\n", "exp.yaml:1: 'modules' must hold keys and values, not 3", ""),
        ("exp_name: a\n", "exp.yaml: 'modules:' must hold one of pre_trainer", ""),
        ("modules:\n", "exp.yaml: 'modules:' must hold one of pre_trainer", ""),
        (module("framework: native"), "exp.yaml: module 'pre_trainer' has no 'model'", "llama3.1_8B.yaml"),
        (module("model: llama3.1_8"), "exp.yaml:4: no model 'llama3.1_8'", "'llama3.1_8B'"),
        (module("model: dir/x.yaml"), "exp.yaml:4: no such file: dir/x.yaml", ""),
        (module("model: 8"), "exp.yaml:4: expected the name of a file, got 8", ""),
        (module("model: {num_layers: 2}"), "exp.yaml:4: 'model' must be the name of a preset", "overrides"),
        (module("model: tiny\nframework: {a: 1}"), "exp.yaml:5: 'framework' must be the name of a backend", ""),
        (module("model: tiny\nconfig: pretrainer"), "exp.yaml:5: no trainer 'pretrainer'", "'pre_trainer'"),
        ("exp_name: a/b\n" + SMALL[16:], "exp.yaml:1: exp_name 'a/b' cannot name a folder", "letters"),
        ("exp_name: " + 300 * "x" + "\n" + SMALL[16:], "exp.yaml:1: exp_name 'xxxx", "letters"),
        ("exp_name: ' '\n" + SMALL[16:], "exp.yaml:1: exp_name ' ' begins with '-', or begins or ends", "letters"),
        ("exp_name: 'night '\n" + SMALL[16:], "exp.yaml:1: exp_name 'night ' begins with '-', or", "letters"),
        ("exp_name: -rf\n" + SMALL[16:], "exp.yaml:1: exp_name '-rf' begins with '-'", "letters"),
        ("exp_name: [a]\n" + SMALL[16:], "exp.yaml:1: exp_name: expected str, got array (['a'])", ""),
        ("exp_name: {a: b}\n" + SMALL[16:], "exp.yaml:1: exp_name: expected str, got object (a mapping)", ""),
        ('exp_name: "a\\eb"\n' + SMALL[16:], "exp.yaml:1: exp_name 'a\\x1bb' holds a control character", "printable"),
        ('workspace: "a\\nb"\n' + SMALL, "exp.yaml:1: workspace 'a\\nb' holds a control character", "printable"),
        ('workspace: "a\\0b"\n' + SMALL, "exp.yaml:1: workspace: text cannot hold a NUL character", ""),
        ("env: {X: [1]}\n" + SMALL, "exp.yaml:1: env.X: a variable's value must be a scalar", ""),
        ("env: {X: {a: b}}\n" + SMALL, "exp.yaml:1: env.X: a variable's value must be a scalar", ""),
        ('env: {X: "a\\0b"}\n' + SMALL, "exp.yaml:1: env.X: a variable cannot hold a NUL character", ""),
        ("env: {A=B: 1}\n" + SMALL, "exp.yaml:1: env: 'A=B' is not a valid variable name", ""),
    ],
)
def test_a_wrong_key_is_named_with_its_line_and_the_nearest_name(
    write: Write, text: str, problem: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(write(text))
    assert caught.value.problem.startswith(problem)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("train_iters: ten", "train_iters: expected int, got str ('ten')"),
        ("train_iters: 0", "train_iters: expected int >= 1 (0)"),
        ("train_iters: 1.5", "train_iters: expected int, got float (1.5)"),
        ("train_iters: true", "train_iters: expected int, got bool (True)"),
        ("train_iters: null", "train_iters: expected int, got null; remove it to use the default"),
        ("bf16: null", "bf16: expected bool, got null; remove it to use the default"),
        ("train_iters: [1]", "train_iters: expected int, got array ([1])"),
        ("train_iters: {a: 1}", "train_iters: expected int, got object (a mapping)"),
        (
            "train_iters: 99999999999999999999",
            "train_iters: expected int <= 9223372036854775807 (99999999999999999999)",
        ),
        ("bf16: 2", "bf16: expected bool, got int (2)"),
        ("bf16: 'true'", "bf16: expected bool, got str ('true')"),
        ("lr: fast", "lr: expected float, got str ('fast')"),
        ("lr: 1e308", "lr: expected float <= 1000.0 (1e+308)"),
        ("weight_decay: 1e300", "weight_decay: expected float <= 1000000000000.0 (1e+300)"),
        ("lr: -1", "lr: expected float > 0.0 (-1)"),
        ("lr: .inf", "lr: expected a finite number (inf)"),
        ("lr: .nan", "lr: expected a finite number (nan)"),
        ("lr: 1e999", "lr: expected a finite number (inf)"),
        (f"train_iters: {5000 * '9'}", f"train_iters: expected int <= 9223372036854775807 ({80 * '9'}... (5,000 char"),
        (
            f"train_iters: 0x{5000 * 'f'}",
            f"train_iters: expected int <= 9223372036854775807 (0x{78 * 'f'}... (5,002 char",
        ),
        ('load: "a\\0b"', "load: text cannot hold a NUL character"),
        ("lr_decay_style: cosin", "lr_decay_style: 'cosin' is not possible; did you mean 'cosine'?"),
        ("dataset: 5", "dataset: expected "),
        ("train_data_path: [1, {a: 2}]", "train_data_path: expected "),
    ],
)
def test_a_wrong_value_is_named_with_its_line_and_what_was_expected(write: Write, line: str, problem: str) -> None:
    file = write(module(f"model: tiny.yaml\noverrides:\n  {line}"))
    assert problem_of(lambda: load(file)).startswith(f"exp.yaml:6: {problem}")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("bf16: 1", "bf16", True),
        ("bf16: 0", "bf16", False),
        ("bf16: no", "bf16", False),
        ("bf16: ${X:0}", "bf16", False),
        ("bf16: '${X:false}'", "bf16", False),
        ("compile: 1", "compile", True),
        ("compile: auto", "compile", "auto"),
        ("eval_iters: 0", "eval_iters", 0),
        ("eval_interval: 0", "eval_interval", None),
        ("save_interval: 0", "save_interval", None),
        ("num_experts: 0", "num_experts", None),
        ("mtp_num_layers: null", "mtp_num_layers", 0),
        ("moe_router_topk_scaling_factor: null", "moe_router_topk_scaling_factor", 1.0),
        ("split: null", "split", "99,1,0"),
        ("sequence_parallel: null", "sequence_parallel", False),
        ("seq_length: '${X:64}'", "seq_length", 64),
    ],
)
def test_booleans_zero_and_null_are_read_as_engines_read_them(write: Write, line: str, key: str, value: object) -> None:
    resolved = load(write(module(f"model: tiny.yaml\noverrides:\n  {line}")))
    found = getattr(getattr(resolved.experiment.trainer, OWNERS[key]), key)
    assert (found, type(found)) == (value, type(value))
    assert resolved.origins[key] == "exp.yaml:6"


@pytest.mark.parametrize("key", sorted(OWNERS))
def test_null_is_the_default_of_a_key_or_refused_by_name(write: Write, key: str) -> None:
    file = write(module(f"model: tiny.yaml\noverrides:\n  {key}: null"))
    field = next(field for field in structs.fields(GROUPS[OWNERS[key]]) if field.name == key)
    if field.required or needs_value(field):
        assert f"{key}: expected" in problem_of(lambda: load(file))
        assert "remove it" in problem_of(lambda: load(file))
        return
    found = getattr(getattr(load(file).experiment.trainer, OWNERS[key]), key)
    assert found in (None, field.default)


def test_a_key_that_is_set_replaces_its_alternatives_below(write: Write) -> None:
    file = write(
        module("model: tiny.yaml\noverrides:\n  mock_data: true\n  min_lr_ratio: 0.1\n  lr_warmup_fraction: 0.5")
    )
    trainer = load(file, "--min_lr", "0", "--lr_warmup_iters=3", "--dataset", "x").experiment.trainer
    assert (trainer.optimizer.min_lr, trainer.optimizer.min_lr_ratio) == (0.0, None)
    assert (trainer.optimizer.lr_warmup_iters, trainer.optimizer.lr_warmup_fraction) == (3, None)
    assert (trainer.data.dataset, trainer.data.mock_data) == ("x", False)
    same = load(file, "--train_data_path", "null").experiment.trainer
    assert same.data.mock_data, "null takes nothing's place"


def test_a_key_replaces_its_alternatives_of_a_file_or_preset_that_is_extended(write: Write) -> None:
    write(
        module("model: tiny.yaml\nconfig: far.yaml\noverrides:\n  mock_data: true\n  lr_warmup_fraction: 0.5"),
        "base.yaml",
    )
    write("min_lr_ratio: 0.5", "near.yaml")
    write("extends: near.yaml\nmin_lr: 1.0e-6", "far.yaml")
    file = write("extends: base.yaml\n" + module("overrides:\n  lr_warmup_iters: 3\n  seed: 5"))
    trainer = load(file).experiment.trainer
    assert (trainer.optimizer.lr_warmup_iters, trainer.optimizer.lr_warmup_fraction) == (3, None)
    assert (trainer.optimizer.min_lr, trainer.optimizer.min_lr_ratio) == (1e-6, None)
    assert (trainer.data.mock_data, trainer.training.seed) == (True, 5)


# -- unknown keys --

MEGATRON_FILE = "platform: slurm\n" + module(
    "framework: megatron\nmodel: none.yaml\ntrainer_class: x\noverrides:\n"
    "  stderr_sink_level: DEBUG\n  overlap_grad_reduce: true\n  no_load_rng: null"
)


def test_a_backend_that_is_not_there_is_named_before_its_keys(write: Write) -> None:
    text = MEGATRON_FILE.replace("framework: megatron", "framework: megatrn")
    assert problem_of(lambda: load(write(text))).startswith("exp.yaml:5: no framework 'megatrn' (installed: ")


def test_keys_of_another_engine_are_named_as_such(write: Write) -> None:
    text = MEGATRON_FILE.replace("platform: slurm\n", "").replace("    trainer_class: x\n", "")
    text = text.replace("framework: megatron", "framework: native")
    found = problem_of(lambda: load(write(text), "--model", "tiny"))
    assert found.splitlines() == [
        "exp.yaml:7: unknown key 'stderr_sink_level'; it is a setting of Primus",
        "exp.yaml:8: unknown key 'overlap_grad_reduce'; it is a setting of Megatron-LM",
        "exp.yaml:9: unknown key 'no_load_rng'; it is a setting of Megatron-LM",
        "  remove what only Megatron-LM or Primus has, or choose a framework that takes it",
    ]


def test_a_backend_takes_keys_of_its_own(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "KEYS = {'overlap_grad_reduce', 'metrics'}\n\n\ndef check(e): ...\ndef train(e, a): ...\n",
        "p/frameworks/other.py",
    )
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path / "p"))
    text = module("framework: other\nmodel: tiny\noverrides: {overlap_grad_reduce: 1, metrics: {log_freq: 3}}")
    resolved = load(write(text), "--metrics.on=true", "backend_args.more=2")
    assert resolved.experiment.trainer.backend_args == {
        "overlap_grad_reduce": 1,
        "metrics": {"log_freq": 3, "on": True},
        "more": 2,
    }
    assert resolved.origins["backend_args.overlap_grad_reduce"] == "exp.yaml:6"
    assert "did you mean 'overlap_grad_reduce'" in problem_of(lambda: load(write(text), "--overlap_grad_reduc=1"))


def test_many_unknown_keys_are_counted_in_time_that_grows_with_their_number(write: Write) -> None:
    lines = "".join(f"\n  unknown_setting_number_{n}: {n}" for n in range(30_000))
    file = write(module(f"model: tiny.yaml\noverrides:{lines}"))
    started = time.process_time()
    found = problem_of(lambda: load(file))
    assert time.process_time() - started < 6, "of a process that shares its cores"
    assert "... and 29,990 more unknown keys (30,000 in all)" in found
    assert len(found.splitlines()) == 12


def test_all_unknown_keys_are_listed_at_once(write: Write) -> None:
    file = write(module("model: tiny.yaml\noverrides:\n  lrr: 1\n  sead: 2"))
    found = problem_of(lambda: load(file))
    assert "exp.yaml:6: unknown key 'lrr'" in found
    assert "exp.yaml:7: unknown key 'sead'; did you mean 'seed'?" in found


def test_an_integral_float_is_an_integer(write: Write) -> None:
    trainer = load(write(SMALL), "--train_iters=1e3", "seq_length=128.0").experiment.trainer
    assert (trainer.training.train_iters, trainer.training.seq_length) == (1000, 128)
    assert type(trainer.training.train_iters) is int


def test_two_modules_need_a_choice(write: Write) -> None:
    both = "modules:\n  pre_trainer: {model: tiny}\n  sft_trainer: {model: tiny, overrides: {seed: 7}}\n"
    assert "it holds pre_trainer, sft_trainer" in problem_of(lambda: load(write(both)))
    found = load_experiment(write(both), environ={}, stage="sft_trainer").experiment
    assert (found.stage, found.trainer.training.seed) == ("sft_trainer", 7)
    with pytest.raises(UsageError, match="no module 'post_trainer'") as caught:
        load_experiment(write(both), environ={}, stage="post_trainer")
    assert "run 'train pretrain', which trains its module 'pre_trainer'" in caught.value.hint


# -- variables of the workers --


def test_variables_are_text_exactly_as_written(write: Write) -> None:
    file = write("env:\n  A: 010\n  B: 1e3\n  C: yes\n  D:\n  E: 'a # b'\n  F: ${V:1_0}\n" + SMALL)
    env = load(file, "env.G=0x1", "--env.H", "null").experiment.env
    assert env == {"A": "010", "B": "1e3", "C": "yes", "D": "", "E": "a # b", "F": "1_0", "G": "0x1", "H": ""}


def test_a_typed_variable_keeps_its_spelling_and_wins(write: Write) -> None:
    file = write("env: {NCCL_IB_HCA: 'mlx5_0,mlx5_1', A-B: 1}\n" + SMALL)
    env = load(file, "--env.NCCL_IB_HCA", "mlx5_2,mlx5_3").experiment.env
    assert env == {"NCCL_IB_HCA": "mlx5_2,mlx5_3", "A-B": "1"}


# -- the command line --


@pytest.mark.parametrize(
    "words",
    [
        ["--train_iters", "10"],
        ["--train-iters", "10"],
        ["--train_iters=10"],
        ["--train-iters=10"],
        ["train_iters=10"],
        ["train-iters=10"],
        ["modules.pre_trainer.overrides.train_iters=10"],
        ["--modules.pre_trainer.overrides.train_iters", "10"],
        ["--train_iters", "5", "--train_iters", "10"],
        ["--train_iters", "1e1"],
    ],
)
def test_every_way_to_type_an_override_means_the_same(write: Write, words: list[str]) -> None:
    assert load(write(SMALL), *words).experiment.trainer.training.train_iters == 10


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--bf16"], True),
        (["--no-bf16"], False),
        (["--no_bf16"], False),
        (["--bf16=false"], False),
        (["--bf16", "no"], False),
        (["bf16=True"], True),
        (["--no-bf16", "--bf16"], True),
        (["--bf16", "train_iters=3"], True),
        (["--bf16", "--train_iters", "3"], True),
        (["--bf16", "workspace=x"], True),
        (["--bf16", "env.A=1"], True),
        (["--bf16", "model=tiny"], True),
        (["--bf16", "modules.pre_trainer.overrides.lr=1"], True),
        (["--bf16", "0"], False),
    ],
)
def test_a_flag_needs_no_value_and_can_be_negated(write: Write, words: list[str], value: bool) -> None:
    assert load(write(SMALL), *words).experiment.trainer.training.bf16 is value


def test_overrides_are_read_as_yaml_scalars(write: Write) -> None:
    trainer = load(
        write(SMALL),
        *("--lr", "1e-4", "global_batch_size=null", "--train_data_path", "[0.3, a, 0.7, b]", "tokenizer_model=12"),
        *("--split=98,2,0", "--sample_prompt", "a=b", "--dataset", "1e5", "--load", "null"),
    ).experiment.trainer
    assert trainer.optimizer.lr == 1e-4
    assert trainer.training.global_batch_size is None
    assert trainer.data.train_data_path == [0.3, "a", 0.7, "b"]
    assert trainer.data.tokenizer_model == "12"
    assert trainer.data.split == "98,2,0"
    assert trainer.logging.sample_prompt == "a=b"
    assert trainer.data.dataset == "1e5"
    assert trainer.checkpoint.load is None


def test_keys_of_the_experiment_itself_can_be_typed(write: Write) -> None:
    words = (
        "--workspace",
        "/tmp/w",
        "--exp_name",
        "2024",
        "user_name=1e5",
        "--work-group=a b",
        "env.A_b=1",
        "--env.C-d=",
    )
    asked = load(write(SMALL), *words).experiment
    assert (asked.workspace, asked.exp_name, asked.user_name, asked.work_group) == ("/tmp/w", "2024", "1e5", "a b")
    assert asked.env == {"A_b": "1", "C-d": ""}


def test_the_module_itself_can_be_typed(write: Write) -> None:
    trainer = load(write(SMALL), "--model", "llama_quickstart", "--framework=native", "num_layers=3").experiment.trainer
    assert (trainer.framework, trainer.model.hidden_size, trainer.model.num_layers) == ("native", 256, 3)


def test_a_dotted_name_reaches_into_backend_args(write: Write) -> None:
    resolved = load(write(SMALL), "--backend_args.metrics.log_freq", "3", "backend_args.metrics.on=true")
    assert resolved.experiment.trainer.backend_args == {"metrics": {"log_freq": 3, "on": True}}
    assert resolved.origins["backend_args.metrics"] == "--backend_args.metrics.log_freq"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--train_iter", "5"], "--train_iter: unknown key 'train_iter'; did you mean 'train_iters'?"),
        (["train_iters"], "unexpected word 'train_iters'\n  overrides are written --name value or name=value"),
        (["--train_iters", "5", "6"], "unexpected word '6'"),
        (["--train_iters", "--lr", "1"], "--train_iters: train_iters: it needs a value: --train_iters VALUE"),
        (["--train_iters", "ten"], "--train_iters: train_iters: expected int, got str ('ten')"),
        (["--train_iters=1.5"], "--train_iters: train_iters: expected int, got float (1.5)"),
        (["--lr", "-1"], "--lr: lr: expected float > 0.0 (-1)"),
        (["--lr.x", "1"], "--lr.x: lr: expected float, got object (a mapping)"),
        (["--lr=1", "--lr.x=1"], "--lr.x: 'lr' already has a value"),
        (["--training.lr=1"], "--training.lr: unknown key 'training'; keys stand directly under 'overrides:'"),
        (["--model.num_layers=1"], "--model.num_layers: 'model' must be the name of a preset"),
        (["--modules.post_trainer.overrides.lr=1"], "--modules.post_trainer.overrides.lr: the module is 'pre_trainer'"),
        (["-x"], "unexpected word '-x'"),
        (["="], "unexpected word '='"),
        (["--"], "unexpected word '--'"),
        (["--exp_name="], "--exp_name: exp_name '' cannot name a folder"),
        (["--exp_name", ".."], "--exp_name: exp_name '..' cannot name a folder"),
        (["--model", "x" * 300], "--model: no"),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(write: Write, words: list[str], problem: str) -> None:
    assert problem_of(lambda: load(write(SMALL), *words)).startswith(problem)


def test_an_override_of_a_file_changes_nothing_in_it(write: Write) -> None:
    file = write(SMALL)
    load(file, "--lr", "1")
    assert file.read_text() == SMALL


def test_an_experiment_is_not_taken_for_the_model_preset_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "llama3.1_8B.yaml"
    file.write_text("modules:\n  pre_trainer: {model: llama3.1_8B.yaml, overrides: {mock_data: true}}\n")
    assert load_experiment(file, environ={}).experiment.trainer.model.num_layers == 32


@pytest.mark.parametrize(
    ("words", "own", "warmup"),
    [
        (("--train_iters", "20"), "", 2),
        (("--train_iters", "5"), "", 1),
        (("--train_iters", "40"), "", 4),
        (("--train_iters", "41"), "", 40),
        (("--train_iters", "20"), ", lr_warmup_iters: 40", 40),
        (("--train_iters", "20", "--lr_warmup_iters", "40"), "", 40),
        (("--train_iters", "20", "--lr_decay_iters", "90"), "", 40),
    ],
)
def test_only_the_warmup_of_a_preset_is_shortened_with_a_short_run(
    words: tuple[str, ...], own: str, warmup: int, tmp_path: Path
) -> None:
    file = tmp_path / "e.yaml"
    preset = "framework: megatron, config: pre_trainer.yaml, model: tiny.yaml"
    module = f"{{{preset}, overrides: {{mock_data: true{own}}}}}"
    file.write_text(f"modules: {{pre_trainer: {module}}}\n")
    found = load_experiment(file, words, environ={})
    assert found.experiment.trainer.optimizer.lr_warmup_iters == warmup
    assert any("shortened to" in note for note in found.notes) == (warmup < 40)


def test_compile_of_a_frameworks_preset_does_not_reach_another_engine(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    preset = "framework: torchtitan, config: pre_trainer.yaml, model: tiny.yaml"
    file.write_text(f"modules: {{pre_trainer: {{{preset}, overrides: {{mock_data: true}}}}}}\n")
    own, other = (load_experiment(file, words, environ={}) for words in ((), ("--framework", "megatron")))
    assert own.experiment.trainer.training.compile is True
    assert other.experiment.trainer.training.compile == "auto"
    assert any("compile of preset:" in note for note in other.notes)
    typed = load_experiment(file, ("--framework", "megatron", "--compile", "true"), environ={})
    assert typed.experiment.trainer.training.compile is True

"""An experiment becomes the files of a run folder and comes back unchanged; one that cannot be trained is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from experiment_examples import EXPERIMENTS
from primus import experiment, redaction, registry
from primus.checkpoint import manifest
from primus.checkpoint.manifest import CheckpointManifest
from primus.checkpoint.shape import build_shape
from primus.config.extended_files import load_model
from primus.config.load import Resolved, load_experiment
from primus.config.schema import Experiment, LoggingConfig, ModelSpec, Trainer
from primus.errors import UsageError
from primus.redaction import MASK, redact_value
from primus.runs.files import write_text
from primus.runs.store import Run

SMALL = "modules: {pre_trainer: {model: tiny.yaml, overrides: {mock_data: true, seq_length: 128}}}\n"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return file


def through_a_run_folder(asked: Experiment, folder: Path) -> Experiment:
    for name, text in experiment.format_files(Resolved(asked, {})).items():
        write_text(folder / name, text)
    return experiment.read_run_experiment(Run(folder))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_example_survives_a_run_folder(path: Path, tmp_path: Path) -> None:
    asked = load_experiment(path, environ={}).experiment
    assert through_a_run_folder(asked, tmp_path) == asked


@pytest.mark.parametrize("name", registry.list_plug_ins("models"))
def test_a_model_survives_a_run_folder(name: str, tmp_path: Path) -> None:
    asked = Experiment(exp_name="x", trainer=Trainer(model=load_model(name)))
    assert through_a_run_folder(asked, tmp_path) == asked


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
confusing = texts | st.sampled_from(
    ["1e5", "010", "null", "~", "yes", "1:30", "2024-01-01", "${X}", "${X:", "<secret", "0x1"]
)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | confusing,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
variables = st.dictionaries(st.from_regex(r"[A-Za-z_.-][A-Za-z0-9_.-]*", fullmatch=True), confusing, max_size=3)
printable = confusing.map(lambda text: "".join(letter for letter in text if letter.isprintable()))
names = printable.filter(
    lambda text: text not in ("", ".", "..") and "/" not in text and len(text) < 50 and text.strip().lstrip("-") == text
)


@given(
    exp_name=names,
    user_name=printable,
    workspace=printable,
    env=variables,
    backend_args=st.dictionaries(texts, plain_values, max_size=3),
    prompt=confusing,
    project=st.none() | confusing,
)
def test_any_experiment_survives_a_run_folder(
    tmp_path_factory: pytest.TempPathFactory,
    env: dict[str, str],
    backend_args: dict[str, Any],
    prompt: str,
    project: str,
    **top: str,
) -> None:
    with redaction.scope():  # what one example names as a secret is none in the next
        env = {name: value for name, value in env.items() if redact_value(name, value) == value}
        logging = LoggingConfig(sample_prompt=prompt, wandb_project=project)
        trainer = Trainer(model=load_model("tiny"), logging=logging, backend_args=backend_args)
        asked = Experiment(env=env, trainer=trainer, **top)
        files = experiment.format_files(Resolved(asked, {}))
        # A run folder keeps no secret, nor what looks like one.
        assume(not any(MASK in text for text in files.values()))
        assert through_a_run_folder(asked, tmp_path_factory.getbasetemp() / "any") == asked


def test_secrets_of_an_experiment_stay_out_of_its_files(small: Path, tmp_path: Path) -> None:
    resolved = load_experiment(small, ["--env.HF_TOKEN=canary-1", "--env.PLAIN=shown"], environ={})
    files = experiment.format_files(resolved)
    assert "canary" not in "".join(files.values())
    assert "HF_TOKEN: <secret>" in files[experiment.CONFIG_FILE]
    for name, text in files.items():
        write_text(tmp_path / name, text)
    assert experiment.read_run_experiment(Run(tmp_path)).env == {"PLAIN": "shown"}, (
        "the value comes from today's environment"
    )


# -- what is refused --


def refused(file: Path, *overrides: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        experiment.resolve_experiment(file, overrides, {})
    return caught.value


def test_heads_that_tensor_parallel_does_not_divide_are_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(
        "modules:\n  pre_trainer:\n    model: llama3.1_8B\n    overrides:\n"
        "      mock_data: true\n      tensor_model_parallel_size: 3\n"
    )
    error = refused(file)
    assert error.problem.startswith(f"{file}:6: ")
    assert "tensor_model_parallel_size: 3" in error.problem
    assert "32" in error.problem


@pytest.mark.parametrize(
    ("overrides", "problem", "hint"),
    [
        (
            ["global_batch_size=7", "micro_batch_size=2"],
            "--global_batch_size: global_batch_size 7 is not a multiple",
            "such as 8",
        ),
        (
            ["seq_length=257"],
            "--seq_length: seq_length 257 is longer than the model's max_position_embeddings 256",
            "rope",
        ),
        (["mock_data=false"], "no training data is named", "set one of dataset, train_data_path"),
        (["dataset=x", "mock_data=1"], "dataset and mock_data exclude each other", "set one of"),
        (["dataset=python-stdlb"], "--dataset: no dataset 'python-stdlb'", "did you mean 'python-stdlib'?"),
        (["dataset=python-stdlib"], "--dataset: the dataset python-stdlib needs a tokenizer", "tokenizer_model"),
        (["dataset=owner/name"], "--dataset: the dataset owner/name needs a tokenizer", "tokenizer_model"),
        (["adam_beta1=1.0"], "--adam_beta1: adam_beta1: expected float < 1.0", ""),
        (["train_iters=5", "lr_warmup_iters=9"], "--lr_warmup_iters: lr_warmup_iters warms up for 9 steps", "fewer"),
        (["train_iters=5", "lr_warmup_iters=5"], "lr_warmup_iters warms up for 5 steps", "fewer"),
        (["lr_warmup_fraction=1"], "--lr_warmup_fraction: lr_warmup_fraction warms up for 1000 steps", "fewer"),
        (["lr_warmup_iters=9", "lr_decay_iters=8"], "but the decay ends at lr_decay_iters 8", "fewer"),
        (["lr_warmup_iters=9", "lr_warmup_fraction=0.1"], "lr_warmup_iters and lr_warmup_fraction exclude", "null"),
        (["min_lr=1e-5", "min_lr_ratio=0.1"], "min_lr and min_lr_ratio exclude each other", "null"),
        (["lr_decay_style=WSD", "train_iters=9", "lr_wsd_decay_iters=10"], "lr_wsd_decay_iters 10 is longer than", ""),
        (["load=none"], "load: no folder none", "give a checkpoint"),
        (
            ["mock_data=false", "train_data_path=none/x"],
            "--train_data_path: train_data_path: no such data: none/x.idx",
            "data prepare",
        ),
        (["mock_data=false", "train_data_path=[0.5,a,b]"], "train_data_path: a blend must be weight, prefix", "found"),
        (["split=0,1"], "--split: split '0,1'", "such as 99,1,0"),
        (["min_lr=1"], "--min_lr: min_lr 1.0 is above lr 0.0003", ""),
        (["framework=nativ"], "no framework 'nativ'", "did you mean 'native'?"),
        (["num_query_groups=3"], "num_query_groups: 3 does not divide", "use one of"),
        (["backend_args.x=1"], "backend_args", "remove"),
        (["mtp_num_layers=1"], "", "native"),
    ],
)
def test_what_cannot_be_trained_is_refused(small: Path, overrides: list[str], problem: str, hint: str) -> None:
    error = refused(small, *overrides)
    assert problem in error.problem
    assert hint in str(error)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["train_iters=5", "lr_warmup_iters=5", "lr_decay_style=constant"],
        ["train_iters=5", "lr_warmup_iters=9", "lr_decay_iters=100"],
        ["lr=1e-5", "min_lr_ratio=0.1"],
        ["eval_iters=0", "eval_interval=10"],
    ],
)
def test_a_schedule_that_fits_is_accepted(small: Path, overrides: list[str]) -> None:
    experiment.resolve_experiment(small, overrides, {})


def checkpoint_of(spec: ModelSpec, folder: Path) -> Path:
    """A checkpoint of a model as far as its manifest tells."""
    step = folder / "step_00000100"
    step.mkdir(parents=True)
    described = CheckpointManifest(
        backend="native",
        run="r",
        step=100,
        consumed_samples=1,
        model=build_shape(spec),
        data_fingerprint="",
        compiled=False,
        world_size=1,
        torch_version="2",
        created=0.0,
        algorithm="blake2b",
        files=[],
    )
    manifest.write_manifest(step, described)
    return step


def test_a_checkpoint_of_another_shape_is_refused_before_anything_starts(small: Path, tmp_path: Path) -> None:
    spec = load_model("tiny")
    experiment.resolve_experiment(small, [f"load={checkpoint_of(spec, tmp_path / 'same')}"], {})
    other = checkpoint_of(structs.replace(spec, hidden_size=2 * spec.hidden_size), tmp_path / "other")
    error = refused(small, f"load={other}")
    assert error.problem.startswith(f"load: {other} is of another model: hidden_size is {2 * spec.hidden_size} there")
    (other / "manifest.json").write_text("{")
    assert "is damaged" in refused(small, f"load={other}").problem


def token_files(prefix: Path, vocab_size: int | None = None) -> Path:
    """An empty pair of token files, with the manifest that `data prepare` writes where a vocabulary is given."""
    for suffix in (".bin", ".idx"):
        prefix.with_name(prefix.name + suffix).touch()
    if vocab_size:
        text = json.dumps({"version": 2, "tokenizer": {"name": "big", "vocab_size": vocab_size, "file": "t.json"}})
        prefix.with_name(prefix.name + ".manifest.json").write_text(text)
    return prefix


def test_an_evaluation_without_validation_data_is_refused_before_anything_starts(small: Path, tmp_path: Path) -> None:
    prefix = token_files(tmp_path / "single")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 1, 2)
    prefix.with_suffix(".idx").write_bytes(header)
    data = ("mock_data=false", f"train_data_path={prefix}", "eval_interval=5")
    error = refused(small, *data)
    assert f"validation data is missing: {prefix} has one document" in error.problem
    assert "eval_iters: 0" in error.hint
    assert "split '1' leaves no documents for it" in refused(small, *data, "split=1").problem
    experiment.resolve_experiment(small, (*data, "eval_iters=0"), {}, "pre_trainer")


def test_a_vocabulary_smaller_than_that_of_the_data_is_refused(small: Path, tmp_path: Path) -> None:
    size = load_model("tiny").vocab_size
    experiment.resolve_experiment(small, [f"train_data_path={token_files(tmp_path / 'fits', size)}"], {})
    error = refused(small, f"train_data_path={token_files(tmp_path / 'large', size + 1)}")
    assert f"the tokenizer big has ids up to {size}, but the model's vocab_size is {size}" in error.problem
    assert f"set vocab_size to {size + 1} or more" in error.hint


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(small: Path, tmp_path: Path) -> None:
    size = load_model("tiny").vocab_size
    tokenizer = tmp_path / "tokenizer.json"
    words = {"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{"id": size, "content": "<end>"}]}
    tokenizer.write_text(json.dumps(words))
    data = f"train_data_path={token_files(tmp_path / 'plain')}"
    assert f"ids up to {size}" in refused(small, data, f"tokenizer_model={tokenizer}").problem
    assert f"ids up to {size}" in refused(small, data, f"tokenizer_model={tmp_path}").problem


def test_native_refuses_what_it_does_not_build(small: Path) -> None:
    assert "native does not support" in refused(small, "--model", "glm5").problem


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_example_is_found_possible_but_for_its_data(path: Path) -> None:
    overrides = ["--mock_data", "--dataset=null", "--train_data_path=null"]
    asked = experiment.resolve_experiment(path, overrides, {}).experiment
    assert structs.asdict(asked)["exp_name"] == path.stem


def test_files_that_only_the_nodes_have_become_notes_and_are_checked_there(small: Path, tmp_path: Path) -> None:
    far = tmp_path / "far"
    words = [
        f"train_data_path=0.3 {far}/a 0.7 {far}/b",
        f"valid_data_path={far}/c",
        f"load={far}/weights",
        "finetune=true",
    ]
    assert "no such data" in refused(small, *words).problem
    planned = experiment.resolve_experiment(small, words, {}, is_elsewhere=True)
    told = [note for note in planned.notes if note.startswith("checked on the nodes: ")]
    assert [note.partition(f"{far}/")[2].partition(" ")[0] for note in told] == ["a.idx", "c.idx", "weights"]
    assert planned.experiment.trainer.checkpoint.load == f"{far}/weights"
    with pytest.raises(UsageError, match="no such data"):
        experiment.check_files(planned)
    far.mkdir()
    for name in "abc":
        token_files(far / name)
    with pytest.raises(UsageError, match="load: no folder"):
        experiment.check_files(planned)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train_data_path=0.5 /far/a 0 /far/b"], "the weights of a blend must be positive"),
        (["train_data_path=/far/a", "split=x"], "split 'x'"),
        (["train_data_path=/far/a", "eval_interval=5", "split=1"], "leaves no documents"),
        (["train_data_path=/far/a", "mock_data=true"], "exclude each other"),
    ],
)
def test_what_can_be_seen_from_here_is_refused_here(small: Path, words: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        experiment.resolve_experiment(small, words, {}, is_elsewhere=True)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_the_launcher_sets_for_each_rank_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "exp.yaml").write_text(f"env: {{NCCL_DEBUG: INFO, {name}: '5'}}\n{SMALL}")
    with pytest.raises(UsageError, match=f"exp.yaml:1: env.{name}: the launcher sets it for each rank"):
        experiment.resolve_experiment(tmp_path / "exp.yaml", (), {})

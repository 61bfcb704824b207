"""Whatever is typed ends in an exit code and a message, never in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fakes import cli
from primus.cli.main import main

CONFIG = "modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8}}}\n"

RUNTIMES = ["direct", "box", "grid", "slurm", "Direct", "tiny"]
TASKS = [
    ["train", "pretrain"],
    ["config", "show"],
    ["config", "check"],
    ["config", "schema"],
    ["config", "init"],
    ["runs", "list"],
    ["runs", "show"],
    ["runs", "diff"],
    ["runs", "clean"],
    ["runs"],
    ["tiny"],
    ["trian"],
]
FLAGS = ["--config", "--exp", "--stage", "--changed", "--text", "--name", "--workspace", "--replay", "--run", "--force"]
FLAGS += [
    "--nproc",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master_port",
    "--single",
    "--env",
    "--image",
    "-N",
    "-x",
]
FLAGS += [
    "--failed",
    "--keep",
    "--older-than-days",
    "--no-failed",
    "--output",
    "--json",
    "--debugg",
    "--help",
    "-h",
    "---",
    "-",
]
KEYS = [
    "lr",
    "--lr",
    "train_iters",
    "--train-iters",
    "--no-bf16",
    "exp_name",
    "--exp_name",
    "env.A",
    "--env.HF_TOKEN",
    "model",
]
KEYS += [
    "--bf16",
    "--no-compile",
    "bf16",
    "eval_iters",
    "mtp_num_layers",
    "--learning_rate",
    "--overlap_grad_reduce",
    "--confg",
    "--nproc_per_node",
    "--workspace",
    "load",
    "dataset",
    "tokenizer_model",
    "min_lr_ratio",
    "lr_warmup_iters",
    "backend_args.x.y",
    "training.lr",
    "--model.num_layers",
    "framework",
    "modules.sft_trainer.overrides.lr",
    "split",
]
VALUES = [
    "e.yaml",
    ".",
    "none.yaml",
    "",
    " ",
    "0",
    "1",
    "-1",
    "1e400",
    "nan",
    "null",
    "[",
    "[1",
    "[a, b]",
    "{a: 1}",
    "a=b",
    "é",
]
VALUES += [
    "9" * 5000,
    "0x" + "f" * 5000,
    "[&a [x], &b [*a, *a], [*b, *b]]",
    "[" * 20_000,
    "!!int x",
    "a\x1b[2Jb",
    "\u202eabc",
    "e.yaml",
    "e.toml",
    "x" * 300,
    "tiny",
    "llama3.1_8B.yaml",
    "../..",
    "2024-13-45",
    "${HOME}",
    "&a [*a]",
    "<<",
    "\t",
    "a\nb",
    "1" * 30,
    "~",
]

word = st.sampled_from(FLAGS + KEYS + VALUES)
assignment = st.builds("{}={}".format, st.sampled_from(FLAGS + KEYS), st.sampled_from(VALUES))
words = st.lists(
    word | assignment | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/")), max_size=5
)
runtime = st.builds(lambda name, own: [name, *own], st.sampled_from(RUNTIMES), words)
orderly = st.builds(
    lambda before, runtimes, task, own: [*before, *(w for r in runtimes for w in [*r, "--"]), *task, *own],
    st.lists(st.sampled_from(["--json", "--dry-run", "--version"]), max_size=1),
    st.lists(runtime | st.just(["direct"]), min_size=1, max_size=2),
    st.sampled_from(TASKS),
    words | st.builds(lambda more: ["--config", "e.yaml", *more], words),
)
wild = st.lists(
    st.sampled_from([*RUNTIMES, *(word for task in TASKS for word in task), "--"]) | word | assignment, max_size=8
)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(cli.PLUGINS))
    monkeypatch.setenv("PATH", "/nowhere")  # srun, docker and ssh would speak for themselves
    (tmp_path / "e.yaml").write_text(CONFIG)
    return tmp_path


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=orderly | wild)
@example(words=["direct", "--", "train", "pretrain", "--replay"])
@example(words=["direct", "--", "config", "show", "--config", "e.yaml", "--vocab_size", "9" * 30])
@example(words=["direct", "--", "runs", "list", "--workspace", "x" * 300])
@example(words=["direct", "--", "runs", "show", "x" * 300])
@example(words=["direct", "--", "config", "init", "tiny", "--output", "x" * 300])
@example(
    words=[
        "--dry-run",
        "direct",
        "--",
        "train",
        "pretrain",
        "--config",
        "e.yaml",
        "--workspace",
        "x" * 300,
        "--auto_continue_train",
    ]
)
def test_any_words_end_in_an_exit_code(words: list[str], workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trains = any(word in ("pretrain", "tiny") or "pretrain" in word for word in words)
    code = main(["--dry-run", *words] if trains else words)
    out, err = capfd.readouterr()
    assert code in (0, 1, 2, 3)
    assert "Traceback" not in out + err
    assert "internal error" not in err
    notes = all(line.startswith("replay:") for line in err.splitlines())
    assert notes if code == 0 else err.startswith("primus-cli: ")

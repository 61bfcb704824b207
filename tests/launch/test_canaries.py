"""No secret is found in anything that a run leaves behind or says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import cli

EXPERIMENT = """\
env: {MY_API_KEY: canary-e, DB: 'postgres://me:canary-f@host/db'}
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 2}}}
"""
SHELL = {"HF_TOKEN": "canary-a", "WANDB_API_KEY": "canary-b", "HTTPS_PROXY": "http://me:canary-c@proxy:1"}


def left_behind(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("night.yaml", "secrets.env")]
    assert len(files) > 10
    return "".join(path.read_text(errors="replace") for path in files)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    (tmp_path / "secrets.env").write_text("MLFLOW_TRACKING_PASSWORD=canary-h\n")
    return tmp_path


def test_a_training_run_tells_no_secret(workplace: Path) -> None:
    options = ["--env", "GH_TOKEN=canary-d", "--env=AWS_SECRET_ACCESS_KEY=canary-g", "--env", "secrets.env"]
    task = ["train", "pretrain", "--config", "night.yaml", "env.A_TOKEN=canary-i", "--env.B_TOKEN", "canary-j"]
    done = cli.run("direct", *options, "--", *task, cwd=workplace, **SHELL)
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout + done.stderr + left_behind(workplace)
    dump = (workplace / "output/night/latest/env/primus_env_dump.txt").read_text()
    for name in ("HF_TOKEN", "GH_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "MY_API_KEY", "A_TOKEN"):
        assert f"{name}=<secret>  # " in dump
    assert "HTTPS_PROXY=<hidden " in dump

    for task in (["runs", "show", "night"], ["runs", "diff", "night", "night"], ["runs", "list"]):
        for form in ([], ["--json"]):
            shown = cli.run(*form, "direct", "--", *task, cwd=workplace, **SHELL)
            assert shown.returncode == 0, shown.stderr
            assert "canary" not in shown.stdout

    again = cli.run("direct", "--", "train", "pretrain", "--replay", "output/night/latest", cwd=workplace, **SHELL)
    assert again.returncode == 0, again.stderr
    assert "canary" not in again.stdout + again.stderr + left_behind(workplace)
    environment = (workplace / "output/night/latest/env/primus_env_dump.txt").read_text()
    assert "DB=" not in environment, "a masked value is not given back as if it were one"


@pytest.mark.parametrize(
    "words",
    [
        ["--dry-run", "direct", "--env", "X_TOKEN=canary", "--", "train", "pretrain", "--config", "night.yaml"],
        ["--dry-run", "--json", "direct", "--env", "secrets.env", "--", "train", "pretrain", "--config", "night.yaml"],
        ["direct", "X_TOKEN=canary", "--", "runs", "list"],
        ["direct", "--", "X_TOKEN=canary"],
        ["X_TOKEN=canary"],
        ["direct", "--x-token", "canary", "--", "runs", "list"],
        ["direct", "--", "runs", "show", "X_TOKEN=canary"],
        ["direct", "--", "train", "pretrain", "--config", "night.yaml", "X_TOKEN=canary"],
        ["direct", "--", "train", "pretrain", "--config", "night.yaml", "stray", "--x_token", "canary"],
        ["direct", "--env", "canary-token-alone.txt", "--", "runs", "list"],
        ["direct", "--", "config", "show", "--config", "night.yaml"],
        ["--json", "direct", "--", "config", "show", "--config", "night.yaml", "env.X_TOKEN=canary"],
    ],
)
def test_neither_a_plan_nor_an_error_tells_a_secret(workplace: Path, words: list[str]) -> None:
    (workplace / "canary-token-alone.txt").write_text("hf_canary_alone\n")
    done = cli.run(*words, cwd=workplace, **SHELL)
    said = (done.stdout + done.stderr).replace("canary-token-alone.txt", "")
    assert said
    assert "canary" not in said

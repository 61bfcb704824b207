"""`tune train` and `tune sweep` run real trials of an engine that reports planned speeds."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from fakes.tools import is_gone
from primus.cli.main import main

ENGINE = '''\
"""Reports speeds by micro batch size, and is out of memory at 8."""

import os

def check(experiment):
    pass


def train(experiment, attempt):
    settings = experiment.trainer.training
    attempt.event("run_started", step=0, attempt=attempt.number, world_size=1, device="stopwatch")
    if settings.micro_batch_size == 8:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    for step in range(1, settings.train_iters + 1):
        threads = min(4, int(os.environ.get("OMP_NUM_THREADS", "1")))
        keeps_memory = os.environ.get("MALLOC_MMAP_MAX_") == "0"
        rate = (150.0 if keeps_memory else 100.0) * threads * settings.micro_batch_size * (1 + 0.001 * (step % 3))
        loss = abs(experiment.trainer.optimizer.lr - 0.3) + 1 / step
        attempt.event("step", step=step, loss=loss, tokens_per_s=rate)
'''
EXPERIMENT = """\
exp_name: night
workspace: output
modules:
  pre_trainer:
    framework: stopwatch
    model: tiny
    overrides:
      mock_data: true
      seq_length: 8
      micro_batch_size: 1
"""


@pytest.fixture(autouse=True)
def prepare_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "plugins" / "frameworks" / "stopwatch.py"
    engine.parent.mkdir(parents=True)
    engine.write_text(ENGINE)
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path / "plugins"))


def call_tune(words: str) -> int:
    return main(["direct", "--", "tune", *shlex.split(words)])


def read_result(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert call_tune(words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_fastest_batch_that_fits_becomes_a_patch_and_a_second_search_runs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "train --config night.yaml --keys micro_batch_size=2,8 --steps 12 --json"
    result = read_result(words, capsys)
    assert result["best"]["settings"] == {"micro_batch_size": "2"}
    assert result["gain"] == pytest.approx(1.0, abs=0.01)
    states = {trial["settings"].get("micro_batch_size"): trial["state"] for trial in result["trials"]}
    assert states == {None: "done", "2": "done", "8": "out of memory"}
    assert "+      micro_batch_size: 2" in Path(result["patch"]).read_text()
    assert (Path(result["study"]) / result["best"]["run"] / "metadata.json").is_file()
    again = read_result(words, capsys)
    assert again["trials"] == result["trials"]


def test_variables_of_a_search_hold_even_if_the_shell_has_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = "train --config night.yaml --keys env.OMP_NUM_THREADS=4 env.MALLOC_MMAP_MAX_=0 --steps 6 --json"
    result = read_result(words, capsys)
    assert result["best"]["settings"]["env.OMP_NUM_THREADS"] == "4"
    assert result["gain"] == pytest.approx(5.0, abs=0.01)
    patch = Path(result["patch"]).read_text()
    assert "+  OMP_NUM_THREADS: 4" in patch and "+  MALLOC_MMAP_MAX_: 0" in patch


def test_a_sweep_compares_losses(capsys: pytest.CaptureFixture[str]) -> None:
    result = read_result("sweep --config night.yaml --keys lr=0.2,0.4,0.3 --steps 6 --json", capsys)
    assert result["best"]["settings"] == {"lr": "0.3"}
    assert len(result["trials"]) == 4


def test_what_the_experiment_has_already_is_not_trained_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = "sweep --config night.yaml --keys micro_batch_size=1,2 lr=0.2,0.20 --steps 6 lr=0.2 --json"
    result = read_result(words, capsys)
    assert [trial["settings"] for trial in result["trials"]] in (
        [{}, {"micro_batch_size": "2", "lr": "0.2"}],
        [{"micro_batch_size": "2", "lr": "0.2"}, {}],
    )
    assert result["as_written"]["settings"] == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --config night.yaml --keys micro_batch_sise=1,2", "did you mean 'micro_batch_size'"),
        ("train --config night.yaml --keys micro_batch_size", "not a key with values"),
        ("train --config nihgt.yaml --keys lr=1", "nihgt.yaml"),
        ("train --config night.yaml", "needs --keys"),
        ("threads --config night.yaml", "no task 'tune threads'\n  search variables: tune train --keys env.OMP_NUM"),
        ("inductor --exp night.yaml", "no task 'tune inductor'\n  keep compiled kernels by torch.compiler.save_cache"),
    ],
)
def test_bad_input_is_one_message_before_any_trial(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_tune(words) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not Path("output").exists()


def test_no_result_is_an_error_with_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert call_tune("sweep --config night.yaml --keys lr=1 micro_batch_size=8 --steps 6 micro_batch_size=8") == 1
    assert "out of memory" in capsys.readouterr().err


def test_two_processes_share_the_runs_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["direct", "--", "tune", "sweep", "--config", "night.yaml", "--keys", "lr=0.2,0.4,0.3", "--steps", "6"]
    command = [sys.executable, "-m", "primus", "--json", *words]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    results = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    assert [result["best"]["settings"] for result in results] == [{"lr": "0.3"}] * 2
    assert len(list(Path("output/tune").glob("night-*/runs/*/night/2*"))) == 4


def test_a_dry_run_lists_the_candidates_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--dry-run direct -- tune sweep --config night.yaml --keys lr=0.2,0.4"
    assert main(shlex.split(words)) == 0
    text = capsys.readouterr().out
    assert "3 candidates for night, by loss, 100 steps" in text and "lr=0.4" in text
    assert not Path("output").exists()


def test_collectives_of_gloo_have_nothing_to_tune(capsys: pytest.CaptureFixture[str]) -> None:
    assert call_tune("collectives --config night.yaml") == 3
    assert "gloo, which processes on CPUs use, has no settings to tune" in capsys.readouterr().err
    assert main(["--dry-run", "direct", "--", "tune", "collectives", "--config", "night.yaml", "--channels", "8"]) == 0
    assert "5 candidates" in capsys.readouterr().out
    assert not Path("output").exists()


STOPPED_SEARCH = """
import os, sys, types
from pathlib import Path
from primus.tuning.search.training import TrialTraining, run_training
sys.executable = sys.argv[1]
context = types.SimpleNamespace(layout=None, overrides=[], environ=dict(os.environ))
run_training(TrialTraining(config="night.yaml", workspace=Path("output"), limit_s=60), context)
"""
STOPPED_COMPARISON = """
import sys
from pathlib import Path
from primus.launch.child_run import train_in_child
sys.executable = sys.argv[1]
train_in_child(Path("night.yaml"), [], {}, None)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("script", [STOPPED_SEARCH, STOPPED_COMPARISON])
def test_a_task_that_is_stopped_leaves_no_training_behind(tmp_path: Path, script: str, number: signal.Signals) -> None:
    training, pid_file = tmp_path / "training", tmp_path / "pid"
    training.write_text(f"#!/bin/sh\necho $$ >'{pid_file}.new'; mv '{pid_file}.new' '{pid_file}'; exec sleep 60\n")
    training.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", script, str(training)], stderr=subprocess.DEVNULL) as task:
        cli.wait_for(pid_file.exists, "the training")
        task.send_signal(number)
        task.wait(20)
    assert is_gone(int(pid_file.read_text()))

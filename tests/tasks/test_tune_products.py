"""`tune gemm --config` tunes an experiment, and later runs use the result, or say why not."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from primus.cli.main import main
from primus.runs.tuned_files import find_store

EXPERIMENT = """\
exp_name: night
workspace: output
modules:
  pre_trainer:
    framework: native
    model: tiny
    overrides: {mock_data: true, seq_length: 16, micro_batch_size: 2, train_iters: 3, bf16: false, log_interval: 1}
"""
WORDS = "tune gemm --config night.yaml --measure 0.001 --steps 24"
TRAIN = "train pretrain --config night.yaml eval_interval=0 save_interval=0 disable_last_saving=true"
pytestmark = pytest.mark.native


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    return tmp_path


def call(words: str, capfd: pytest.CaptureFixture[str], code: int = 0) -> str:
    capfd.readouterr()
    assert main(["direct", *shlex.split(words)]) == code
    output = capfd.readouterr()
    return output.out + output.err


def find_table() -> Path:
    return next(find_store(os.environ).glob("gemm-*.json"))


def change_table(**fields: Any) -> None:
    table = json.loads(find_table().read_text())
    table.update(fields)
    find_table().write_text(json.dumps(table))


@pytest.mark.slow
def test_an_experiment_is_tuned_and_later_runs_say_what_they_use(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = call(f"-- {WORDS}", capfd)
    assert "real steps: step time x" in result or "0 of" in result
    table = json.loads(find_table().read_text())
    products = table["products"]
    assert {each["product"]["operator"] for each in products} >= {"mm"}
    # Whether a form won depends on the machine: the rest of this test plants winners.
    for each in products:
        if each["product"]["operator"] == "mm":
            each |= {"form": "onednn", "is_kept": True}
    count = sum(each["is_kept"] for each in products)
    change_table(products=products)
    assert f"tuned matrix products: {count} of {len(products)} shapes use a tuned form" in call(f"-- {TRAIN}", capfd)
    run = (folder / "output" / "night" / "latest").resolve()
    assert json.loads((run / "config" / "tuned_gemm.json").read_text())["products"] == products
    assert "tuned matrix products" not in call(f"--no-tuned -- {TRAIN}", capfd)
    untuned = (folder / "output" / "night" / "latest").resolve()
    # A replay computes as the run did, whatever was tuned since.
    assert "tuned matrix products" not in call(f"-- train pretrain --replay {untuned}", capfd)
    find_table().write_text("{")
    assert f"{count} of {len(products)} shapes use a tuned form" in call(f"-- train pretrain --replay {run}", capfd)
    assert "damaged" in call(f"-- {TRAIN}", capfd)
    find_table().write_text(json.dumps({**table, "products": products}))
    change_table(valid_for={**table["valid_for"], "torch": "2.1.0"})
    assert "not used: tuned for torch 2.1.0, this is" in call(f"-- {TRAIN}", capfd)
    change_table(valid_for=table["valid_for"], products=[{**each, "form": "magic"} for each in products])
    assert "this version has no form 'magic'" in call(f"-- {TRAIN}", capfd)


def test_stages_work_one_by_one_and_a_killed_search_resumes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "first: tune gemm --config night.yaml --stage tune" in call(f"-- {WORDS} --stage use", capfd, 2)
    assert "products in a step, from a step on fake tensors" in call(f"-- {WORDS} --stage collect", capfd)
    (search,) = (folder / "output" / "tune").glob("night-gemm-*")
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "primus", "direct", "--", *shlex.split(WORDS), "--stage", "tune"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "1 of" in child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
    parts = sorted((search / "parts").glob("*.json"))
    assert parts and not (search / "table.json").exists()
    finished = parts[0].read_text()
    parts[-1].write_text("{cut off")
    assert "products have a faster form" in call(f"-- {WORDS} --stage tune", capfd)
    assert len(parts) == 1 or parts[0].read_text() == finished
    assert len(json.loads((search / "table.json").read_text())["products"]) == len(list((search / "parts").glob("*")))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("tune gemm --config nihgt.yaml", 2, "nihgt.yaml"),
        ("tune gemm --config night.yaml --stage tone", 2, "tone"),
        ("tune gemm --config night.yaml --shapes night.yaml", 1, "no matrix products of hipBLASLt"),
        ("tune gemm lr=1 --shapes night.yaml", 2, "changes an experiment"),
    ],
)
def test_bad_input_is_one_message(
    words: str, code: int, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = call(f"-- {words}", capfd, code)
    assert message in text and "Traceback" not in text


def test_two_tuners_on_one_machine_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from primus.tasks.tune._products import claim_machine

    with claim_machine(os.environ):
        assert "this machine is used for tuning by process" in call(f"-- {WORDS}", capfd, 2)

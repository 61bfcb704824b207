"""The commands that the documentation promises for macOS work in a Python without what only Linux has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fakes import cli

DARWIN = Path(__file__).parent / "fakes/darwin"
EXPERIMENT = """\
exp_name: mac
modules:
  pre_trainer:
    framework: native
    config: pre_trainer.yaml
    model: tiny.yaml
    overrides: {mock_data: true, seq_length: 64, train_iters: 2, micro_batch_size: 2, compile: false, bf16: false}
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "mac.yaml").write_text(EXPERIMENT)
    return tmp_path


def run(*words: str, cwd: Path) -> str:
    done = cli.run(*words, cwd=cwd, timeout_s=200, PYTHONPATH=f"{DARWIN}:{cli.SOURCE}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_dry_runs_and_runs_need_no_linux(workplace: Path) -> None:
    code = "import os, sys; print(sys.platform, hasattr(os, 'sched_getaffinity'), os.path.exists('/proc/self'))"
    env = cli.environment(PYTHONPATH=f"{DARWIN}:{cli.SOURCE}")
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout == (
        "darwin False False\n"
    )
    assert "primus" in run("--version", cwd=workplace)
    assert "valid" in run("direct", "--", "config", "check", "--config", "mac.yaml", cwd=workplace)
    assert "train_iters: 2" in run("direct", "--", "config", "show", "--config", "mac.yaml", cwd=workplace)
    assert "nproc: 1" in run("--dry-run", "direct", "--", "train", "pretrain", "--config", "mac.yaml", cwd=workplace)
    train = ("train", "pretrain", "--config", "mac.yaml")
    assert "sbatch" in run("--dry-run", "slurm", "sbatch", "-N", "2", "--", *train, cwd=workplace)
    assert "no runs" in run("direct", "--", "runs", "list", cwd=workplace)
    run("direct", "--", "env", "show", cwd=workplace)


@pytest.mark.native
@pytest.mark.slow
def test_data_and_training_on_the_cpu_need_no_linux(workplace: Path) -> None:
    pytest.importorskip("ctypes.macholib")  # which macOS has, and the Python of Debian leaves out
    (workplace / "text").mkdir()
    for number in range(20):
        (workplace / f"text/{number}.txt").write_text(f"the quick brown fox {number} jumps over the lazy dog\n" * 20)
    prepare = ("data", "prepare", "--input", "text", "--tokenizer", "bpe:300", "--output", "data/mine")
    assert "--train_data_path" in run("direct", "--", *prepare, cwd=workplace)
    run("direct", "--", "data", "inspect", "data/mine_text_document", cwd=workplace)
    train = ("train", "pretrain", "--config", "mac.yaml")
    assert "2 steps" in run("direct", "--nproc", "2", "--", *train, cwd=workplace)
    assert "done" in run("direct", "--", "runs", "list", cwd=workplace)

"""`train --check layout`, and what `train` refuses without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primus.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3.1_70B-pretrain.yaml"
MODEL = (
    "--num_layers 4 --hidden_size 64 --ffn_hidden_size 128 --num_attention_heads 4 --num_query_groups 2"
    " --vocab_size 256 --max_position_embeddings 64 --seq_length 32 --mock_data true --global_batch_size 8"
)


def run_primus(words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PRIMUS_LAUNCHER_FILE": ""}
    environ |= variables
    return subprocess.run(
        [sys.executable, "-m", "primus", *words.split()],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def write_experiment(folder: Path) -> Path:
    file = folder / "tiny.yaml"
    file.write_text("exp_name: tiny\nmodules: {pre_trainer: {framework: native, model: llama3.1_8B.yaml}}\n")
    return file


@pytest.mark.parametrize(
    ("runtimes", "size"),
    [
        ("slurm sbatch -N 64 -- container --image x", "64 nodes x 8"),
        ("slurm sbatch -N8 --gpus-per-node=mi300x:4", "8 nodes x 4"),
        ("slurm srun --nodes=8 -- container --image x -- direct --nproc 4", "8 nodes x 4"),
        ("kubernetes create --replica 4 --gpu 8 --image x", "4 nodes x 8"),
        ("ssh --hosts node[01-05] --spare-nodes 1", "4 nodes x 8"),
        ("direct --nnodes 4 --node-rank 0 --master-addr a --nproc 8", "4 nodes x 8"),
    ],
)
def test_nodes_and_devices_are_those_that_the_runtimes_ask_for(
    runtimes: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--no-config --dry-run {runtimes} -- train pretrain --config {EXAMPLE} --check layout"
    assert main(words.split()) == 0
    assert f"({size} x " in capsys.readouterr().out


def test_a_range_of_nodes_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--no-config --dry-run slurm sbatch -N 2-4 -- train pretrain --config {EXAMPLE} --check layout"
    assert main(words.split()) == 0
    assert "check layout: skipped, since the options do not tell the number of nodes" in capsys.readouterr().out


def test_variables_of_the_cluster_tell_the_nodes_of_a_launcher_on_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NNODES": "4", "NODE_RANK": "0", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    given = f"direct --nproc 8 -- train pretrain --config {EXAMPLE} --check layout"
    assert main(["--no-config", "--dry-run", *given.split()]) == 0
    assert "(4 nodes x 8 x " in capsys.readouterr().out


def test_a_dry_run_of_a_job_prints_what_would_be_checked(tmp_path: Path) -> None:
    given = f"--dry-run slurm sbatch -N 64 -- train pretrain --config {EXAMPLE} --check layout"
    done = run_primus(f"{given} --check-assume mi300x:8", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "check layout: ranks 0, 128, 384 of 512 (64 nodes x 8 x MI300X)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_does_not_divide_is_refused_in_the_dry_run(tmp_path: Path) -> None:
    given = f"--dry-run slurm sbatch -N 3 -- train pretrain --config {EXAMPLE} --check layout"
    done = run_primus(f"{given} --check-assume mi300x:8", tmp_path)
    assert done.returncode == 2 and "24 processes cannot be laid out" in done.stderr


@pytest.mark.parametrize(
    ("framework", "reason"), [("megatron", "no step on fake tensors"), ("native", "needs PyTorch")]
)
def test_what_cannot_be_executed_here_is_not_refused(framework: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('a login node')")
    file = tmp_path / "f.yaml"
    file.write_text(EXAMPLE.read_text().replace("framework: native", f"framework: {framework}"))
    given = f"slurm sbatch -N 64 -- train pretrain --config {file} --check layout"
    done = run_primus(given, tmp_path, PYTHONPATH=str(tmp_path), PATH="/nowhere")
    assert "check layout: skipped: " in done.stdout and reason in done.stdout
    assert "sbatch" in done.stderr, "it went on to submit"


def test_a_run_that_is_resumed_has_no_layout_to_check(tmp_path: Path) -> None:
    done = run_primus("direct -- train pretrain --run x --check layout", tmp_path)
    assert done.returncode != 0


@pytest.mark.slow
def test_what_cannot_run_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    given = f"--config {write_experiment(tmp_path)} {MODEL} --check layout --check-assume mi300x:4"
    words = f"slurm sbatch -N 1 -- train pretrain {given}"
    done = run_primus(f"{words} --num_distributed_optimizer_instances 3", tmp_path)
    assert done.returncode == 2 and "rank 0 of 4: num_distributed_optimizer_instances" in done.stderr
    assert not (tmp_path / "output").exists()

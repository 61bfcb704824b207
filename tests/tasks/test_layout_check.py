"""`train --check layout`, and what `train` refuses without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primus.tasks.train._layout_check import find_num_nodes

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3.1_70B-pretrain.yaml"
MODEL = (
    "--num_layers 4 --hidden_size 64 --ffn_hidden_size 128 --num_attention_heads 4 --num_query_groups 2"
    " --vocab_size 256 --max_position_embeddings 64 --seq_length 32 --mock_data true --global_batch_size 8"
)


def run_primus(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "PRIMUS_LAUNCHER_FILE": ""}
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
    ("words", "expected"),
    [(("-N", "64"), 64), (("--nodes=3",), 3), (("sbatch", "-N8", "-p", "x"), 8), (("--nnodes", "2"), 2), ((), 1)],
)
def test_the_nodes_are_those_of_the_runtime(words: tuple[str, ...], expected: int) -> None:
    assert find_num_nodes(words) == expected


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

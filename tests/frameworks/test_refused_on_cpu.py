"""fp8 and context parallelism that would not be in force on a CPU are refused before a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fakes import cli
from frameworks.megatron.test_support import build_experiment
from primus import registry
from primus.errors import EXIT_USAGE, UsageError
from primus.framework import FRAMEWORKS

QUICKSTART = str(Path(__file__).parents[2] / "examples/quickstart.yaml")
MACHINES = Path(__file__).parents[1] / "machines"
REASONS = {
    "torchtitan": ("e4m3", "GPU"),
    "megatron": ("e4m3", "Transformer Engine, which needs a GPU"),
    "maxtext": ("hybrid", "on GPUs only; a CPU emulates it"),
    "jax": ("e4m3", "jax does not support 8-bit floating point"),
    "huggingface": ("e4m3", "huggingface does not support 8-bit floating point"),
}


@pytest.mark.parametrize("engine", REASONS)
def test_fp8_that_a_cpu_does_not_have_is_refused_with_the_reason(engine: str) -> None:
    fp8, reason = REASONS[engine]
    experiment = build_experiment(training={"fp8": fp8})
    experiment = replace(experiment, trainer=replace(experiment.trainer, framework=engine))
    with pytest.raises(UsageError, match=f"fp8: {fp8}: ") as refused:
        registry.load_plug_in(FRAMEWORKS, engine).check(experiment)
    assert reason in refused.value.problem
    assert refused.value.exit_code == EXIT_USAGE
    assert "fp8: null" in refused.value.hint


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_context_parallelism_that_a_cpu_does_not_have_is_refused_with_the_reason(engine: str) -> None:
    experiment = build_experiment(parallel={"context_parallel_size": 2})
    experiment = replace(experiment, trainer=replace(experiment.trainer, framework=engine))
    with pytest.raises(UsageError, match=r"context_parallel_size: 2: .*GPU") as refused:
        registry.load_plug_in(FRAMEWORKS, engine).check(experiment)
    assert refused.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("quantization", ["fp8_full", "nanoo_fp8"])
def test_an_own_word_of_maxtext_for_8_bit_numbers_is_refused_on_a_cpu(quantization: str) -> None:
    experiment = build_experiment(backend_args={"quantization": quantization})
    experiment = replace(experiment, trainer=replace(experiment.trainer, framework="maxtext"))
    with pytest.raises(UsageError, match=f"quantization: {quantization}: MaxText has 8-bit") as refused:
        registry.load_plug_in(FRAMEWORKS, "maxtext").check(experiment)
    assert refused.value.hint == "set quantization: '', or train on GPUs"


def test_a_launch_without_gpus_names_what_needs_one_before_it_starts(tmp_path: Path) -> None:
    words = ("direct", "--", "train", "pretrain", "--config", QUICKSTART, "--framework", "maxtext", "--fp8", "hybrid")
    refused = cli.run(*words, cwd=tmp_path)
    assert refused.returncode == EXIT_USAGE and not (tmp_path / "output").exists()
    assert "fp8: hybrid: MaxText has 8-bit floating point on GPUs only" in refused.stderr
    note = "this machine has no AMD or NVIDIA GPU and cannot train it: fp8: hybrid"
    assert note in cli.run("--dry-run", *words, cwd=tmp_path).stdout
    check = ("direct", "--", "config", "check", *words[4:])
    assert note in cli.run(*check, cwd=tmp_path).stdout
    with_gpus = cli.run(*check, cwd=tmp_path, PRIMUS_MACHINE_ROOT=str(MACHINES / "mi300x-8"))
    assert with_gpus.returncode == 0 and "note" not in with_gpus.stdout

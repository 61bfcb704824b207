"""fp8 and context parallelism that would not be in force on a CPU are refused before a worker starts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from frameworks.megatron.test_support import build_experiment
from primus import registry
from primus.errors import EXIT_USAGE, UsageError
from primus.framework import FRAMEWORKS

REASONS = {
    "native": "native trains in bf16 or fp32",
    "torchtitan": "GPU",
    "megatron": "Transformer Engine, which needs a GPU",
    "jax": "jax does not support 8-bit floating point",
    "huggingface": "huggingface does not support 8-bit floating point",
}


@pytest.mark.parametrize("engine", REASONS)
def test_fp8_that_a_cpu_does_not_have_is_refused_with_the_reason(engine: str) -> None:
    experiment = build_experiment(training={"fp8": "e4m3"})
    experiment = replace(experiment, trainer=replace(experiment.trainer, framework=engine))
    with pytest.raises(UsageError, match="fp8: e4m3: ") as refused:
        registry.load_plug_in(FRAMEWORKS, engine).check(experiment)
    assert REASONS[engine] in refused.value.problem
    assert refused.value.exit_code == EXIT_USAGE
    assert "fp8: null" in refused.value.hint


@pytest.mark.parametrize("engine", ["torchtitan", "megatron"])
def test_context_parallelism_that_a_cpu_does_not_have_is_refused_with_the_reason(engine: str) -> None:
    experiment = build_experiment(parallel={"context_parallel_size": 2})
    experiment = replace(experiment, trainer=replace(experiment.trainer, framework=engine))
    with pytest.raises(UsageError, match=r"context_parallel_size: 2: .*GPU") as refused:
        registry.load_plug_in(FRAMEWORKS, engine).check(experiment)
    assert refused.value.exit_code == EXIT_USAGE

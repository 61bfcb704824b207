"""MaxText against native, from the same weights on the same tokens; an engine of MaxText that is saved and loaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_python import build_command, engine_variables

pytestmark = [pytest.mark.engine("maxtext"), pytest.mark.slow, pytest.mark.timeout(700)]

SCRIPT = Path(__file__).with_name("maxtext_steps.py")
TIME_LIMIT_S = 600
XLA_FLAGS = "--xla_backend_optimization_level=0"
"""Compiles in less time; these programs are run only a few times."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = build_command("maxtext", SCRIPT, "compare_llama", "compare_experts", "resume", "refuse_sizes")
    env = engine_variables("maxtext") | {
        "XLA_FLAGS": XLA_FLAGS,
        # The second engine of `resume` finds its program there.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_losses_are_those_of_native(steps: dict[str, Any]) -> None:
    found = {"llama": steps["compare_llama"], "qwen3": steps["resume"]["native"]}
    for kind, differences in found.items():
        assert differences["first"] <= 1e-6, kind
        assert differences["loss"] <= 5e-5, kind
        assert differences["grad_norm"] <= 1e-4, kind


def test_first_losses_of_experts_are_those_of_transformers(steps: dict[str, Any]) -> None:
    for kind, differences in steps["compare_experts"].items():
        assert differences["changed"] == 0, kind
        assert differences["first"] <= 2e-6, kind
        assert differences["grad_norm"] <= 1e-4, kind


def test_a_resumed_engine_gives_the_same_bits(steps: dict[str, Any]) -> None:
    assert steps["resume"]["found"] == steps["resume"]["expected"]
    assert steps["resume"]["files"] == ["config.json", "model.safetensors", "optimizer_state"]


def test_sizes_of_a_mesh_that_do_not_fit_the_devices_are_refused(steps: dict[str, Any]) -> None:
    assert "ici_fsdp_parallelism: 3: MaxText has no mesh of these sizes" in steps["refuse_sizes"]
    assert "the number of devices, 1" in steps["refuse_sizes"]

"""The JAX engine against native, from the same weights on the same tokens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_python import engine_python, engine_variables

pytestmark = [pytest.mark.engine("jax"), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("jax_steps.py")
TIME_LIMIT_S = 280


def run_script(name: str, **variables: str) -> Any:
    env = engine_variables("jax") | variables
    done = subprocess.run(
        [engine_python("jax"), SCRIPT, name], env=env, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def assert_within_tolerance(found: dict[str, dict[str, float]]) -> None:
    """The bounds of parity in float32 on CPUs; a wrong setting shows at 1e-4 and above."""
    for name, differences in found.items():
        assert differences["first"] <= 1e-6, name
        assert differences["loss"] <= 5e-5, name
        assert differences["grad_norm"] <= 1e-4, name


def test_losses_of_each_family_are_those_of_native() -> None:
    found = run_script("compare_kinds")
    assert set(found) == {"llama", "llama-tied", "qwen2.5", "qwen3"}
    assert_within_tolerance(found)


def test_documents_recomputation_and_loss_chunks_change_no_loss() -> None:
    assert_within_tolerance(run_script("compare_settings"))


def test_two_devices_of_a_process_give_the_losses_of_one() -> None:
    assert_within_tolerance(run_script("compare_layouts", XLA_FLAGS="--xla_force_host_platform_device_count=2"))


def test_a_resumed_engine_gives_the_same_bits_and_its_weights_have_hub_names() -> None:
    found = run_script("resume")
    assert found["found"] == found["expected"]
    assert found["files"] == ["config.json", "model.safetensors", "optimizer_state"]
    assert "model.layers.1.self_attn.q_proj.bias" in found["names"] and "lm_head.weight" not in found["names"]


def test_a_step_that_is_not_finite_is_skipped() -> None:
    assert run_script("skip_nonfinite") == {"skipped": True, "unchanged": True}

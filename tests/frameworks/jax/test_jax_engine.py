"""The JAX engine against native, from the same weights on the same tokens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_python import XLA_FLAGS, build_command, engine_variables

pytestmark = [pytest.mark.engine("jax"), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("jax_steps.py")
TIME_LIMIT_S = 280
SCRIPTS = ("compare_kinds", "compare_settings", "resume", "save_types", "skip_nonfinite", "sum_losses")


def run_scripts(folder: Path, *names: str, flags: str = "") -> dict[str, Any]:
    """Results by name, all from one process; programs that are compiled twice come from a cache."""
    env = engine_variables("jax") | {
        "XLA_FLAGS": f"{XLA_FLAGS} {flags}",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        build_command("jax", SCRIPT, *names), env=env, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scripts(tmp_path_factory.mktemp("programs"), *SCRIPTS)


def assert_within_tolerance(found: dict[str, dict[str, float]]) -> None:
    """The bounds of parity in float32 on CPUs; a wrong setting shows at 1e-4 and above."""
    for name, differences in found.items():
        assert differences["first"] <= 1e-6, name
        assert differences["loss"] <= 5e-5, name
        assert differences["grad_norm"] <= 1e-4, name


def test_losses_of_each_family_are_those_of_native(one_device: dict[str, Any]) -> None:
    found = one_device["compare_kinds"]
    assert set(found) == {"llama", "llama-tied", "qwen2.5", "qwen3", "trained"}
    assert_within_tolerance(found)


def test_documents_recomputation_and_loss_chunks_change_no_loss(one_device: dict[str, Any]) -> None:
    assert_within_tolerance(one_device["compare_settings"])


def test_two_devices_of_a_process_give_the_losses_of_one(tmp_path: Path) -> None:
    found = run_scripts(tmp_path, "compare_layouts", flags="--xla_force_host_platform_device_count=2")
    assert_within_tolerance(found["compare_layouts"])


def test_a_resumed_engine_gives_the_same_bits_and_its_weights_have_hub_names(one_device: dict[str, Any]) -> None:
    found = one_device["resume"]
    assert found["found"] == found["expected"]
    assert found["files"] == ["config.json", "model.safetensors", "optimizer_state"]
    assert "model.layers.1.self_attn.q_proj.bias" in found["names"] and "lm_head.weight" not in found["names"]


def test_arrays_of_each_type_come_back_from_a_file(one_device: dict[str, Any]) -> None:
    assert one_device["save_types"] == dict.fromkeys(("float32", "bfloat16", "int32", "uint32", "scalar"), True)


def test_a_step_that_is_not_finite_is_skipped(one_device: dict[str, Any]) -> None:
    assert one_device["skip_nonfinite"] == {"skipped": True, "unchanged": True}


def test_summing_losses_costs_two_units_in_the_last_place_at_most(one_device: dict[str, Any]) -> None:
    assert one_device["sum_losses"] <= 2 * 2**-21, "float32 between 4 and 8; one sum after the other has 3e-6"

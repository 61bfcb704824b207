"""Models of Transformers against native, from the same weights on the same tokens."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_python import build_command, engine_variables

pytestmark = [pytest.mark.engine("huggingface"), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("huggingface_steps.py")
TIME_LIMIT_S = 280


def start_script(name: str, **variables: str) -> subprocess.Popen[str]:
    env = engine_variables("huggingface") | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        build_command("huggingface", SCRIPT, name), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_result(process: subprocess.Popen[str]) -> Any:
    try:
        out, errors = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(out.splitlines()[-1])


def assert_within_tolerance(name: str, differences: dict[str, float]) -> None:
    """The bounds of parity in float32 on CPUs; a wrong setting shows at 1e-4 and above."""
    assert differences["first"] <= 1e-6, name
    assert differences["loss"] <= 5e-5, name
    assert differences["grad_norm"] <= 1e-4, name


def test_losses_of_each_family_are_those_of_native() -> None:
    found = read_result(start_script("compare_kinds"))
    dense = {"llama", "llama-tied", "qwen2.5", "qwen3", "trained", "masked", "recomputed"}
    assert set(found) == dense | {"mixtral", "qwen3_moe"}
    for name, differences in found.items():
        assert_within_tolerance(name, differences)


def test_a_resumed_engine_gives_the_same_bits_and_its_checkpoint_is_read_by_hub_names() -> None:
    found = read_result(start_script("resume"))
    assert found["found"] == found["expected"]
    moments = {"exp_avg": True, "exp_avg_sq": True}
    assert found["read"] == {"differences": [], "updates": 3.0, "moments": moments}, "other engines load it"


def test_two_processes_that_shard_the_model_give_the_losses_of_native() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [start_script("compare_processes", RANK=str(rank), **place) for rank in range(2)]
    for rank, process in enumerate(processes):
        assert_within_tolerance(f"rank {rank}", read_result(process))

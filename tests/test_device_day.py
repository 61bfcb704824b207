"""What is prepared for a machine with a GPU works on a CPU with tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "device_day.py"


@pytest.mark.native
@pytest.mark.slow
def test_every_measured_part_ends_with_results(tmp_path: Path) -> None:
    parts = ["kernels", "experts", "products", "profile"]
    command = [sys.executable, str(PROGRAM), *parts, "--device", "cpu", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    logs = "\n".join(file.read_text()[-2000:] for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(each["part"], each["state"]) for each in summary] == [(part, "ok") for part in parts]
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    assert {each["name"] for each in kernels["rows"]} == {"attention", "linear cross-entropy", "experts"}
    assert kernels["trial"] and not any(each["problem"] for each in kernels["trial"])
    [cell] = json.loads((tmp_path / "tiny-experts.json").read_text())["cells"]
    assert cell["engines"]["native"]["tokens_per_second"] > 0
    assert (tmp_path / "gemm.json").is_file()
    assert list((tmp_path / "device-day").glob("*/profiles/attempt_0/*.json.gz"))


def test_an_unknown_part_is_refused_with_the_valid_ones() -> None:
    command = [sys.executable, str(PROGRAM), "kernel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "unknown: kernel; valid: tests, kernels, dense" in done.stderr

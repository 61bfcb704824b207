"""Thresholds are read from a file that cannot demand the impossible."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primus.errors import UsageError
from primus.preflight.findings import thresholds


def load(tmp_path: Path, text: str) -> thresholds.Thresholds:
    (tmp_path / "limits.yaml").write_text(text)
    return thresholds.load_thresholds(tmp_path / "limits.yaml")


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    found = load(tmp_path, "memlock_gib: 64\nfloors:\n  mi300x: {gemm_bf16: 600}\n  default: {memory_copy: 1000}\n")
    assert found.memlock_gib == 64
    assert found.shm_gib == thresholds.Thresholds().shm_gib
    assert found.list_floors("MI300X") == {"gemm_bf16": 600, "memory_copy": 1000}
    assert found.list_floors(None) == {"memory_copy": 1000}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("memlok_gib: 64\n", r"limits.yaml:1: unknown key 'memlok_gib'\s+did you mean 'memlock_gib'"),
        ("a: 1\n", "limits.yaml:1: unknown key 'a'"),
        ("smi_limit_s: soon\n", "limits.yaml:1: smi_limit_s: expected float, got str \\('soon'\\)"),
        ("pcie_replay: 1.5\n", "limits.yaml:1: pcie_replay: expected int, got float"),
        ("smi_warn_s: -1\n", "limits.yaml:1: smi_warn_s: expected float >= 0.0"),
        ("floors: 3\n", r"limits.yaml:1: floors is not a mapping\s+floors map device models"),
        ("floors:\n  MI300X: 3\n", "limits.yaml:2: floors.MI300X is not a mapping"),
        ("floors:\n  MI301X: {gemm_bf16: 1}\n", r"limits.yaml:2: .*MI301X"),
        ("floors:\n  MI300X: {gem_bf16: 1}\n", r"limits.yaml:2: no test 'gem_bf16' has a floor\s+did you mean"),
        (
            "floors:\n  MI300X:\n    memory_copy: 5525.433\n",
            r"limits.yaml:3: MI300X cannot reach 5525.43 GB/s: its peak",
        ),
        ("floors:\n  MI300X:\n    gemm_bf16: 1400\n", r"limits.yaml:3: MI300X cannot reach 1400 TFLOP/s: its peak"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert re.search(problem, str(caught.value)), str(caught.value)

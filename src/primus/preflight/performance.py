"""What the measured performance of nodes says of their fitness."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from primus.machine.facts import Facts
from primus.machine.measured import Asked, Results
from primus.preflight.finding import Finding

CONFIG_FILE = "config/preflight.json"
"""Where the workers of a run find what they are asked to measure."""

__all__ = ["CONFIG_FILE", "Asked", "Results", "Thresholds", "demanded", "findings", "plan", "read"]


class Thresholds(Struct, frozen=True, kw_only=True):
    """What the user demands; None leaves it to the device's profile."""

    gemm_tflops_min: float | None = None
    hbm_gbs_min: float | None = None
    """Of the memory's copy rate."""
    rccl_gbs_min: float | None = None
    """Of the bus bandwidth of a node's all_reduce of `rccl_size_mb`."""
    rccl_size_mb: int = 64
    """MiB."""
    free_memory_gb_min: float | None = None
    """Of each device, 1e9 B."""


def plan(facts: Facts, thresholds: Thresholds, *, is_quick: bool, timeout_s: float = 120.0) -> Asked:
    """What to measure on machines like the one of `facts`."""
    raise NotImplementedError


def demanded(environ: Mapping[str, str], given: Thresholds) -> Thresholds:
    """`given`, completed from the existing system's PRIMUS_PREFLIGHT_MIN_TFLOPS and _MIN_FREE_MEM_GB.

    Raises:
        UsageError: A variable is not a positive number.
    """
    raise NotImplementedError


def read(folder: Path, asked: Asked, world_size: int) -> Results:
    """What the workers of the run in `folder` measured, as far as they came."""
    raise NotImplementedError


def findings(results: Results, facts: Facts, thresholds: Thresholds) -> list[Finding]:
    """Judge what was measured; `host` of a finding names the node that it is about, empty for all."""
    raise NotImplementedError

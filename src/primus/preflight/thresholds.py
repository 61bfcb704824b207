"""Thresholds of a fit node: defaults with their source, and a file that overrides them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from primus.config import source
from primus.config.source import Leaf, Tree
from primus.errors import UsageError, did_you_mean
from primus.machine import profile as profiles
from primus.machine.profile import Profile

GIB = 1 << 30


class Thresholds(Struct, frozen=True, kw_only=True):
    """Limits of the checks. Those without a source are our proposal."""

    memory_available_percent: float = 10.0
    """Least host memory that is available (AMD-AGI/Primus preflight)."""
    memlock_gib: float = 32.0
    """Least memory that may be locked where RDMA registers buffers (AMD-AGI/Primus node_smoke)."""
    shm_gib: float = 8.0
    """Least size of /dev/shm where devices are used (AMD-AGI/Primus node_smoke)."""
    clock_skew_s: float = 30.0
    """Largest distance of a node's clock from node 0's (AMD-AGI/Primus node_smoke)."""
    kernel_log_hours: float = 12.0
    """How far back the kernel log counts, since boot at most."""
    smi_warn_s: float = 1.0
    """A management tool that takes longer is suspicious (AMD-AGI/Primus node_smoke)."""
    smi_limit_s: float = 30.0
    """A management tool that takes longer stands for a hung driver. AMD-AGI/Primus node_smoke allows 5 s, for
    `rocm-smi --version`; `amd-smi metric` takes 8 s for the 64 partitions of a node in CPX mode."""
    gpu_busy_gib: float = 2.0
    """Device memory in use before we touch it (AMD-AGI/Primus node_smoke)."""
    gpu_activity_percent: float = 20.0
    """Device activity before we touch it (AMD-AGI/Primus node_smoke)."""
    temperature_c: float = 100.0
    """Junction temperature (AMD-AGI/Primus-SaFE node monitors)."""
    ecc_correctable: int = 10_000
    """Correctable errors, summed over the node (AMD-AGI/Primus-SaFE node monitors)."""
    pcie_replay: int = 1_000
    """PCIe replays, summed over the node (AMD-AGI/Primus-SaFE node monitors)."""
    host_ecc_correctable: int = 1_000
    """Corrected errors of one memory controller of the host since boot."""
    pcie_correctable: int = 1_000
    """Corrected PCIe errors of one function since boot."""
    nvme_error_entries: int = 100
    """Failed entries in an NVMe drive's error log (AMD-AGI/Primus-SaFE node monitors)."""
    storage_free_gib: float = 10.0
    """Free space where runs, data and models are kept: a small checkpoint with its optimizer state."""
    temporary_free_gib: float = 1.0
    """Free space for temporary files: the compiler caches of one node."""
    storage_mb_per_s: float = 100.0
    """Least rate of writing and reading where runs are kept: a checkpoint of 100 GB then takes a quarter of an hour."""
    free_inodes: int = 10_000
    """Files that may still be made in each folder."""
    outlier_percent: float = 5.0
    """A device this far below the median of all is named."""
    floors: dict[str, dict[str, float]] = {}
    """Floors by device model and test (``gemm_bf16`` in TFLOP/s, ``memory_copy`` and ``all_reduce_64m`` in GB/s), over
    those of the model's profile, of a whole GPU; ``default`` holds those of any model."""

    def list_floors(self, model: str | None) -> dict[str, float]:
        """The floors in the file for a device model, by test."""
        return self.floors.get("default", {}) | self.floors.get(model or "", {})


FLOORS = (
    *(f"gemm_{dtype}" for dtype in ("bf16", "fp16", "fp32")),
    *(f"memory_{kernel}" for kernel in ("copy", "mul", "add", "triad", "dot")),
    "host_to_device",
    "device_to_host",
    "all_reduce",
    "all_reduce_64m",
)
"""Device tests that may have a floor."""


def find_unit(test: str) -> str:
    """Unit of a test's floor."""
    return "TFLOP/s" if test.startswith("gemm") else "GB/s"


def load_thresholds(path: Path) -> Thresholds:
    """Thresholds in a YAML file, on top of the defaults.

    Raises:
        UsageError: A key is unknown, a value is not a number, or a floor is above the peak of its device.
    """
    tree = source.read_yaml(path, None)
    fields = {field.name: field.type for field in structs.fields(Thresholds)}
    values: dict[str, Any] = {}
    for key, item in tree.items():
        if key not in fields:
            raise UsageError(f"{_locate_item(item, path)}: unknown threshold '{key}'", did_you_mean(key, fields))
        values[key] = _parse_floors(item, path) if key == "floors" else _parse_number(item, key, path, fields[key])
    return Thresholds(**values)


def _parse_floors(item: Leaf | Tree, path: Path) -> dict[str, dict[str, float]]:
    if isinstance(item, Leaf):
        raise UsageError(f"{item.origin}: floors maps device models to tests", "such as MI300X: {gemm_bf16: 550}")
    found: dict[str, dict[str, float]] = {}
    for model, tests in item.items():
        if isinstance(tests, Leaf):
            raise UsageError(f"{tests.origin}: floors of {model} map tests to numbers", "such as {gemm_bf16: 550}")
        profile = None if model == "default" else _find_profile(model, tests, path)
        name = profile.model if profile else model
        found[name] = {test: _parse_floor(value, test, profile, path) for test, value in tests.items()}
    return found


def _find_profile(model: str, tests: Tree, path: Path) -> Profile:
    try:
        return profiles.find_profile(model)
    except UsageError as error:
        raise UsageError(f"{_locate_item(tests, path)}: {error.problem}", error.hint) from None


def _parse_floor(item: Leaf | Tree, test: str, profile: Profile | None, path: Path) -> float:
    if test not in FLOORS:
        raise UsageError(f"{_locate_item(item, path)}: no test '{test}' has a floor", did_you_mean(test, FLOORS))
    value = float(_parse_number(item, test, path, float))
    peak = find_peak(profile, test) if profile else None
    if profile and peak is not None and value > peak:
        raise UsageError(
            f"{_locate_item(item, path)}: {profile.model} cannot reach {value:g} {find_unit(test)}: its peak is "
            f"{peak:g}",
            f"use {peak:g} or less; a healthy device reaches about 70 % of its peak",
        )
    return value


def find_peak(profile: Profile, test: str) -> float | None:
    """The theoretical maximum of a device in a test; None if unknown."""
    if test.startswith("gemm_"):
        dtype = test.removeprefix("gemm_")
        return next((peak for name, peak in profile.peaks.items() if name == dtype), None)
    return profile.memory_gb_per_s


def _parse_number(item: Leaf | Tree, key: str, path: Path, kind: Any) -> Any:
    value = item.value if isinstance(item, Leaf) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or value < 0:
        raise UsageError(f"{_locate_item(item, path)}: {key} is a number, not {value!r}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise UsageError(f"{_locate_item(item, path)}: {key} is a whole number, not {value!r}") from None


def _locate_item(item: Leaf | Tree, path: Path) -> str:
    """Position of an item in the file; a mapping has the position of its first value."""
    while not isinstance(item, Leaf):
        if not item:
            return source.format_path(path)
        item = next(iter(item.values()))
    return item.origin

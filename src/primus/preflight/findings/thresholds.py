"""Thresholds of a fit node: defaults with their source, and a file that overrides them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs

from primus.config import source
from primus.config.convert import find_origin
from primus.config.source import Leaf, Tree
from primus.config.written_records import convert_tree
from primus.errors import UsageError, did_you_mean
from primus.machine import profile as profiles
from primus.machine.profile import Profile

Amount = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]


class Thresholds(Struct, frozen=True, kw_only=True):
    """Limits of the checks. Those without a source are our proposal."""

    memory_available_percent: Amount = 10.0
    """Least host memory that is available (AMD-AGI/Primus preflight)."""
    memlock_gib: Amount = 32.0
    """Least memory that may be locked where RDMA registers buffers (AMD-AGI/Primus node_smoke)."""
    shm_gib: Amount = 8.0
    """Least size of /dev/shm where devices are used (AMD-AGI/Primus node_smoke)."""
    clock_skew_s: Amount = 30.0
    """Largest distance of a node's clock from node 0's (AMD-AGI/Primus node_smoke)."""
    kernel_log_hours: Amount = 12.0
    """How far back the kernel log counts, since boot at most."""
    smi_warn_s: Amount = 1.0
    """A management tool that takes longer is suspicious (AMD-AGI/Primus node_smoke)."""
    smi_limit_s: Amount = 30.0
    """A management tool that takes longer stands for a hung driver. AMD-AGI/Primus node_smoke allows 5 s, for
    `rocm-smi --version`; `amd-smi metric` takes 8 s for the 64 partitions of a node in CPX mode."""
    gpu_busy_gib: Amount = 2.0
    """Device memory in use before we touch it (AMD-AGI/Primus node_smoke)."""
    gpu_activity_percent: Amount = 20.0
    """Device activity before we touch it (AMD-AGI/Primus node_smoke)."""
    temperature_c: Amount = 100.0
    """Junction temperature (AMD-AGI/Primus-SaFE node monitors)."""
    ecc_correctable: Count = 10_000
    """Correctable errors, summed over the node (AMD-AGI/Primus-SaFE node monitors)."""
    pcie_replay: Count = 1_000
    """PCIe replays, summed over the node (AMD-AGI/Primus-SaFE node monitors)."""
    host_ecc_correctable: Count = 1_000
    """Corrected errors of one memory controller of the host since boot."""
    pcie_correctable: Count = 1_000
    """Corrected PCIe errors of one function since boot."""
    nvme_error_entries: Count = 100
    """Failed entries in an NVMe drive's error log (AMD-AGI/Primus-SaFE node monitors)."""
    storage_free_gib: Amount = 10.0
    """Free space where runs, data and models are kept: a small checkpoint with its optimizer state."""
    temporary_free_gib: Amount = 1.0
    """Free space for temporary files: the compiler caches of one node."""
    storage_mb_per_s: Amount = 100.0
    """Least rate of writing and reading where runs are kept: a checkpoint of 100 GB then takes a quarter of an hour."""
    free_inodes: Count = 10_000
    """Files that may still be made in each folder."""
    outlier_percent: Amount = 5.0
    """A device this far below the median of all is named."""
    floors: dict[str, dict[str, Amount]] = {}
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
    found = convert_tree(tree, Thresholds, "floors map device models to tests: MI300X: {gemm_bf16: 550}")
    written = tree.get("floors", {})
    assert isinstance(written, dict), "a mapping, as its type says"
    return structs.replace(found, floors=dict(_check_floors(model, item) for model, item in written.items()))


def _check_floors(model: str, tests: Leaf | Tree) -> tuple[str, dict[str, float]]:
    """The name of a model and its floors, none of which is above the peak of the model."""
    assert isinstance(tests, dict), "a mapping, as its type says"
    try:
        profile = None if model == "default" else profiles.find_profile(model)
    except UsageError as error:
        raise UsageError(f"{find_origin(tests)}: {error.problem}", error.hint) from None
    found = {test: _check_floor(item, test, profile) for test, item in tests.items()}
    return profile.model if profile else model, found


def _check_floor(item: Leaf | Tree, test: str, profile: Profile | None) -> float:
    if test not in FLOORS:
        raise UsageError(f"{find_origin(item)}: no test '{test}' has a floor", did_you_mean(test, FLOORS))
    assert isinstance(item, Leaf), "a number, as its type says"
    value = float(item.value)
    peak = find_peak(profile, test) if profile else None
    if profile and peak is not None and value > peak:
        raise UsageError(
            f"{item.origin}: {profile.model} cannot reach {value:g} {find_unit(test)}: its peak is {peak:g}",
            f"use {peak:g} or less; a healthy device reaches about 70 % of its peak",
        )
    return value


def find_peak(profile: Profile, test: str) -> float | None:
    """The theoretical maximum of a device in a test; None if unknown."""
    if test.startswith("gemm_"):
        dtype = test.removeprefix("gemm_")
        return next((peak for name, peak in profile.peaks.items() if name == dtype), None)
    return profile.memory_gb_per_s

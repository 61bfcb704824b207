"""Read the accelerators of this machine from a few files, to choose a build of PyTorch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from primus.bootstrap.torch_builds import ROCM_TARGETS, Hardware, Version, has_forward_compatibility

AMD, NVIDIA = 0x1002, 0x10DE
PROCESSING_ACCELERATOR, CONTROLLER_3D, CONTROLLER_VGA = 0x1200, 0x0302, 0x0300
"""PCI classes (pci.ids). A data-centre device is one of the first two; a VGA controller counts with its driver."""


def read_hardware(root: Path = Path("/")) -> Hardware:
    """The devices of one vendor, NVIDIA before AMD, whose device may be the integrated graphics of the CPU.

    A device without a driver counts only if its PCI class is that of a compute device.
    """
    return _find_nvidia(root) or _find_amd(root) or Hardware()


def _find_nvidia(root: Path) -> Hardware | None:
    driver = _read_driver_version(root)
    on_bus = list(_list_pci_functions(root, NVIDIA))
    # A container has the driver's files of its GPUs, while /sys shows the PCI devices of the whole host.
    folders = list((root / "proc/driver/nvidia/gpus").glob("*"))
    has_driver = bool(driver or folders)
    counted = [device for kind, device in on_bus if kind == CONTROLLER_3D or (has_driver and kind == CONTROLLER_VGA)]
    number = len(folders) or len(counted)
    if not number:
        return None
    name = f"{number} x NVIDIA GPU, {f'driver {driver}' if driver else 'no driver'}"
    compat = has_forward_compatibility(root)
    return Hardware("nvidia", number, name, driver, device_ids=tuple(counted), has_driver=has_driver, has_compat=compat)


def _read_driver_version(root: Path) -> str:
    """Version of the NVIDIA kernel module; the open and the proprietary module format the line differently."""
    text = _read(root / "proc/driver/nvidia/version")
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text + " ")
    return match[1] if match else _read(root / "sys/module/nvidia/version").strip()


def _find_amd(root: Path) -> Hardware | None:
    targets = [target for target in _read_kfd_targets(root) if target in ROCM_TARGETS]
    has_driver = bool(targets)
    # Without amdgpu the PCI class is all that is known; consumer cards and integrated graphics have a display class.
    if not targets:
        targets = ["AMD GPU"] * sum(1 for kind, _ in _list_pci_functions(root, AMD) if kind == PROCESSING_ACCELERATOR)
    if not targets:
        return None
    rocm = _read_rocm_version(root)
    names = ", ".join(f"{count} x {name}" for name, count in Counter(targets).items())
    version = f"ROCm {rocm[0]}.{rocm[1]}" if rocm else "no ROCm installed"
    return Hardware("amd", len(targets), f"{names}, {version}", rocm=rocm, has_driver=has_driver)


def _read_kfd_targets(root: Path) -> Iterator[str]:
    """Architecture of each device of the driver: 90402 is gfx942 (kernel, kfd_topology.c: gfx_target_version)."""
    for file in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        values = dict(re.findall(r"^(\w+) (\d+)$", _read(file), re.MULTILINE))
        number = int(values.get("gfx_target_version", 0))
        # CPUs are nodes of the topology as well: without SIMDs.
        if int(values.get("simd_count", 0)) > 0 and number:
            yield f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"


def _read_rocm_version(root: Path) -> Version | None:
    for file in sorted(root.glob("opt/rocm/.info/version*")) + sorted(root.glob("opt/rocm-*/.info/version*")):
        match = re.match(r"(\d+)\.(\d+)", _read(file))
        if match:
            return int(match[1]), int(match[2])
    return None


def _list_pci_functions(root: Path, vendor: int) -> Iterator[tuple[int, int]]:
    """Class and device id of each PCI function of a vendor."""
    for folder in sorted(root.glob("sys/bus/pci/devices/*")):
        if _number(folder / "vendor") == vendor:
            yield _number(folder / "class") >> 8, _number(folder / "device")


def _number(file: Path) -> int:
    try:
        return int(_read(file).strip() or "0", 16)
    except ValueError:
        return 0


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

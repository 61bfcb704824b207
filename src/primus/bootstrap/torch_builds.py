"""Builds of PyTorch: their targets, and which of them work on given hardware."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

Version = tuple[int, int]

DRIVER_CUDA: tuple[tuple[int, Version], ...] = (
    (580, (13, 0)),
    (575, (12, 9)),
    (570, (12, 8)),
    (565, (12, 7)),
    (560, (12, 6)),
    (555, (12, 5)),
    (550, (12, 4)),
    (545, (12, 3)),
    (535, (12, 2)),
    (530, (12, 1)),
    (525, (12, 0)),
    (450, (11, 0)),
    (0, (10, 2)),
)
"""CUDA version that each branch of the NVIDIA driver brings, newest first. A driver runs every build of the same major
version or an older one (docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html; CUDA toolkit
release notes, table of toolkit and driver versions)."""

FIRST_BLACKWELL_ID = 0x2900
"""PCI device ids ascend with the generations (pci.ids): Hopper 23xx, Ada 26xx to 28xx, Blackwell from 29xx on."""
BLACKWELL_CUDA: Version = (12, 8)
"""Builds for older CUDA versions contain no code for compute capability 10.0 (PyTorch RELEASE.md, CUDA support
matrix)."""
FIRST_TURING_ID = 0x1E00
VOLTA_CUDA: Version = (12, 6)
"""Builds for newer CUDA versions contain no code for Volta and older devices (the same matrix)."""

ROCM_TARGETS = (
    *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950"),
    *("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201"),
)
"""AMD architectures that the ROCm builds are compiled for (PYTORCH_ROCM_ARCH in pytorch/.ci/docker/manywheel/build.sh).
Integrated graphics of CPUs mostly have another architecture, and are not used."""

CUDA_INDEXES: tuple[Version, ...] = ((13, 2), (13, 0), (12, 9), (12, 8), (12, 6), (12, 4), (11, 8))
ROCM_INDEXES: tuple[Version, ...] = ((7, 14), (7, 2), (7, 1), (7, 0), (6, 4), (6, 3), (6, 2))
"""Versions that PyTorch 2.6 to 2.14 are published for, newest first (PyTorch RELEASE.md, release compatibility matrix;
pytorch.org/get-started/previous-versions)."""
INDEX_NAMES = {(6, 2): "rocm6.2.4"}
"""Indexes that are not named by two numbers."""
ROCM_RELEASES_AHEAD = 2
"""By how many releases a ROCm build may be newer than the driver (ROCm, user and kernel-space support matrix)."""

PYPI_CUDA: tuple[tuple[Version, Version], ...] = (
    ((2, 11), (13, 0)),
    ((2, 8), (12, 8)),
    ((2, 7), (12, 6)),
    ((2, 6), (12, 4)),
)
"""CUDA version of the Linux builds on PyPI, whose versions do not state it, by the first version of PyTorch."""


class Build(NamedTuple):
    """Target of a build of PyTorch."""

    kind: str
    """``cpu``, ``cuda`` or ``rocm``; empty if the version does not state it, as on PyPI."""
    version: Version = (0, 0)
    """Of CUDA or ROCm."""
    torch: str = ""
    """Version of PyTorch itself."""

    def __str__(self) -> str:
        names = {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm", "": "the default of its index"}
        name = names[self.kind]
        return f"{name} {self.version[0]}.{self.version[1]}" if self.kind in ("cuda", "rocm") else name


class Hardware(NamedTuple):
    """Facts that decide which build works."""

    vendor: str = ""
    """``amd``, ``nvidia``, or empty without an accelerator."""
    num_devices: int = 0
    name: str = ""
    """Name of the devices for messages."""
    driver: str = ""
    """Version of the NVIDIA driver; empty if unknown."""
    rocm: Version | None = None
    """Installed ROCm."""
    device_ids: tuple[int, ...] = ()
    """PCI device ids."""
    has_driver: bool = True
    has_compat: bool = False
    """Whether cuda-compat is installed, with which data-center devices run a newer CUDA version than their driver's."""

    @property
    def cuda(self) -> Version | None:
        """CUDA version of the driver."""
        return find_cuda_of_driver(self.driver)


def find_cuda_of_driver(driver: str | None) -> Version | None:
    """The CUDA version that an NVIDIA driver such as ``550.54.15`` brings; None if unknown."""
    match = re.match(r"\d+", driver or "")
    if not match:
        return None
    return next((cuda for branch, cuda in DRIVER_CUDA if int(match[0]) >= branch), None)


def build_of_version(text: str) -> Build:
    """The build of a version such as ``2.13.0+rocm7.2``, ``2.12.1+cu126`` or ``2.13.0+cpu``."""
    torch, _, local = text.partition("+")
    rocm = re.match(r"rocm(\d+)\.(\d+)", local)
    cuda = re.match(r"cu(\d+)(\d)(?!\d)", local)
    if rocm:
        return Build("rocm", (int(rocm[1]), int(rocm[2])), torch)
    if cuda:
        return Build("cuda", (int(cuda[1]), int(cuda[2])), torch)
    return Build("cpu" if local.startswith("cpu") else "", torch=torch)


def has_forward_compatibility(root: Path) -> bool:
    """Whether the package cuda-compat is installed, as in images of NGC (CUDA compatibility guide)."""
    return any(root.glob("usr/local/cuda*/compat*/**/libcuda.so.*"))


def find_installed_build(path: Iterable[str]) -> Build | None:
    """The build that an import from `path` would load, read from its version file without importing it."""
    for entry in path:
        file = Path(entry) / "torch" / "version.py"
        if os.access(file, os.R_OK):
            return read_build(file)
    return None


def read_build(file: Path) -> Build:
    """The build of which `file` is torch/version.py."""
    text = file.read_text(encoding="utf-8", errors="replace")
    version = _find_assigned_value(text, "__version__") or "unknown"
    torch = version.partition("+")[0]
    for kind, name in (("rocm", "hip"), ("cuda", "cuda")):
        match = re.match(r"(\d+)\.(\d+)", _find_assigned_value(text, name) or "")
        if match:
            return Build(kind, (int(match[1]), int(match[2])), torch)
    return Build("cpu", torch=torch)


def _find_assigned_value(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}(?::[^=\n]+)? = '([^']*)'", text, re.MULTILINE)
    return match[1] if match else None


def find_mismatch(build: Build, hardware: Hardware) -> str | None:
    """Why `build` cannot use the devices of `hardware`; None if no reason is known."""
    if not hardware.vendor:
        return None
    if build.kind == "cpu":
        return "the build is for CPUs only"
    wanted = {"amd": "rocm", "nvidia": "cuda"}[hardware.vendor]
    if build.kind != wanted:
        maker = "AMD" if hardware.vendor == "amd" else "NVIDIA"
        return f"a build for {build} drives no devices of {maker}"
    return _find_cuda_mismatch(build, hardware) if wanted == "cuda" else None


def _find_cuda_mismatch(build: Build, hardware: Hardware) -> str | None:
    driver = hardware.cuda
    if driver and build.version[0] > driver[0] and not hardware.has_compat:
        least = min((branch for branch, cuda in DRIVER_CUDA if cuda[0] == build.version[0]), default=0)
        needed = f" and needs driver {least} or newer" if least else ""
        return f"driver {hardware.driver} runs CUDA {driver[0]}.x, the build is for CUDA {build.version[0]}.x{needed}"
    if any(number >= FIRST_BLACKWELL_ID for number in hardware.device_ids) and build.version < BLACKWELL_CUDA:
        return f"devices of the Blackwell generation need CUDA 12.8 or newer, the build is for {build}"
    if any(0 < number < FIRST_TURING_ID for number in hardware.device_ids) and build.version > VOLTA_CUDA:
        return f"devices older than Turing need CUDA 12.6 or older, the build is for {build}"
    return None


def choose_indexes(hardware: Hardware) -> list[Build]:
    """The builds to search for on PyTorch's indexes, best first."""
    if hardware.vendor == "amd":
        return [Build("rocm", version) for version in _choose_rocm(hardware.rocm)]
    if hardware.vendor == "nvidia":
        driver = hardware.cuda or CUDA_INDEXES[0]
        # A version that the driver itself brings comes first; a newer minor version works as well.
        ordered = sorted(
            CUDA_INDEXES, key=lambda cuda: (cuda > driver, (-cuda[0], -cuda[1]) if cuda <= driver else cuda)
        )
        builds = [Build("cuda", version) for version in ordered]
        return [build for build in builds if find_mismatch(build, hardware) is None]
    return [Build("cpu")]


def _choose_rocm(installed: Version | None) -> list[Version]:
    """Releases up to the installed one, newest first; then the few newer ones that its driver supports."""
    if installed is None:
        return list(ROCM_INDEXES)
    older = [version for version in ROCM_INDEXES if version <= installed]
    newer = [version for version in reversed(ROCM_INDEXES) if version > installed]
    return older + newer[:ROCM_RELEASES_AHEAD]


def name_index(build: Build) -> str:
    """Name of PyTorch's index for builds like `build`: ``rocm7.2``, ``cu126``, ``cpu``."""
    major, minor = build.version
    if build.kind == "rocm":
        return INDEX_NAMES.get(build.version, f"rocm{major}.{minor}")
    return f"cu{major}{minor}" if build.kind == "cuda" else "cpu"


def choose_version(
    versions: Iterable[str], wanted: Iterable[Build], hardware: Hardware, pin: str, least: str, *, is_pypi: bool = False
) -> str | None:
    """The best of the `versions` of an index; None if none works.

    Args:
        versions: Versions as named by the index: ``2.13.0+cu126``.
        wanted: Builds that work, best first.
        hardware: Hardware on which they must work.
        pin: Version of PyTorch that is preferred over every other one.
        least: Minimum version.
        is_pypi: Whether versions that do not state their build are those of PyPI.
    """
    order = {(build.kind, build.version): rank for rank, build in enumerate(wanted)}
    ranked = []
    for text in versions:
        build = build_of_version(text)
        if not build.kind and is_pypi:
            build = _build_of_pypi(build, hardware)
        place = order.get((build.kind, build.version))
        if (
            place is None
            or not re.fullmatch(r"[\d.]+", build.torch)
            or parse_version(build.torch) < parse_version(least)
        ):
            continue
        by_rocm = (
            place if build.kind == "rocm" and hardware.rocm else 0
        )  # the driver decides; any CUDA release of one major version works
        ranked.append((-by_rocm, build.torch == pin, parse_version(build.torch), -place, text))
    return max(ranked)[-1] if ranked else None


def _build_of_pypi(build: Build, hardware: Hardware) -> Build:
    """Target of PyPI's build. On a machine without accelerators any build works."""
    if not hardware.vendor:
        return Build("cpu", torch=build.torch)
    major_minor = parse_version(build.torch)[:2]
    cuda = next((cuda for first, cuda in PYPI_CUDA if major_minor >= first), (0, 0))
    return Build("cuda", cuda, build.torch)


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers of a version such as ``2.13.0``."""
    return tuple(int(part) for part in re.findall(r"\d+", text))

"""What a run keeps of the machine it ran on: variables, system, packages."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

from msgspec import Struct

from primus.process import output
from primus.runs.files import write_json, write_text
from primus.secret import masked


class SystemInfo(Struct, frozen=True, kw_only=True):
    """The system_info.json of a run."""

    host: str
    kernel: str
    architecture: str
    python: str
    cpu_model: str
    cpu_cores: int
    """Cores that the process may use."""
    memory_bytes: int
    devices: list[str] = []
    """Model of each accelerator."""


def write_environment(folder: Path, environ: Mapping[str, str], sources: Mapping[str, str]) -> None:
    """Write env/ of a run folder.

    Args:
        folder: The run's `env/`.
        environ: Variables of the workers.
        sources: Who set a variable; the others came from the shell.
    """
    lines = [f"{name}={masked(name, value)}  # {sources.get(name, 'shell')}" for name, value in sorted(environ.items())]
    write_text(folder / "primus_env_dump.txt", "\n".join(lines) + "\n")
    system = system_info()
    write_json(folder / "system_info.json", system)
    write_text(folder / "gpu_model.txt", "\n".join(system.devices or ["none"]) + "\n")
    write_text(folder / "packages.txt", "\n".join(f"{name}=={version}" for name, version in packages().items()) + "\n")
    _write_toolkit_versions(folder)


def system_info() -> SystemInfo:
    """The machine as it is now."""
    return SystemInfo(
        host=platform.node(),
        kernel=platform.release(),
        architecture=platform.machine(),
        python=platform.python_version(),
        cpu_model=_cpu_model(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        devices=_device_models(),
    )


def packages() -> dict[str, str]:
    """Version of each installed package, by name in lower case."""
    found = {dist.metadata["Name"].lower(): dist.version for dist in distributions() if dist.metadata["Name"]}
    return dict(sorted(found.items()))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or sys.platform
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _device_models() -> list[str]:
    nvidia = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [_field(path.read_text(), "Model:") for path in nvidia]
    amd = sorted(Path("/sys/class/drm").glob("card*/device/product_name"))
    return models + [path.read_text().strip() for path in amd]


def _field(text: str, name: str) -> str:
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(name)), "unknown")


def _write_toolkit_versions(folder: Path) -> None:
    """rocm_version.txt and cuda_version.txt, where there is such a toolkit."""
    rocm = Path("/opt/rocm/.info/version")
    if rocm.is_file():
        write_text(folder / "rocm_version.txt", rocm.read_text().strip() + "\n")
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        release = output(["nvcc", "--version"]) or ""
        write_text(folder / "cuda_version.txt", f"{driver.read_text().splitlines()[0]}\n{release}\n")

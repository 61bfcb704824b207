"""Record the machine of a run: variables, system, packages."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError
from primus.machine.facts import MachineFacts, Software
from primus.machine.probe import probe
from primus.runs.files import read_json, write_json, write_text
from primus.site_folders import list_package_versions


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
    facts: MachineFacts | None = None
    """All facts about the machine; None in runs of older versions."""


def write_environment(
    folder: Path,
    variables: Mapping[str, str],
    sources: Mapping[str, str],
    facts: MachineFacts | None = None,
    packages: Mapping[str, str] | None = None,
) -> None:
    """Write env/ of a run folder.

    Args:
        folder: The run's `env/`.
        variables: Variables of the workers, with values that may be written.
        sources: Origin of each variable that the launch set; the others come from the shell.
        facts: Facts about the machine, if they are known already.
        packages: Packages of the workers; None for those of this interpreter.
    """
    lines = [f"{name}={text}  # {sources.get(name, 'shell')}" for name, text in sorted(variables.items())]
    write_text(folder / "primus_env_dump.txt", "\n".join(lines) + "\n")
    system = collect_system_info(facts)
    write_json(folder / "system_info.json", system)
    write_text(folder / "gpu_model.txt", "\n".join(system.devices or ["none"]) + "\n")
    found = list_package_versions(sys.path) if packages is None else packages
    write_text(folder / "packages.txt", "".join(f"{name}=={version}\n" for name, version in found.items()))
    if system.facts:
        _write_toolkit_versions(folder, system.facts.software)


def read_system_info(folder: Path) -> SystemInfo | None:
    """The system in `folder`, the `env/` of a run; None if the run ended before it was written, or is of another
    version."""
    try:
        return read_json(folder / "system_info.json", SystemInfo)
    except PrimusError:
        return None


def collect_system_info(facts: MachineFacts | None = None) -> SystemInfo:
    """Describe the machine; reads it if no `facts` are given."""
    facts = facts or probe(environ=os.environ)
    return SystemInfo(
        host=facts.host,
        kernel=facts.software.kernel or platform.release(),
        architecture=facts.cpu.architecture,
        python=platform.python_version(),
        cpu_model=facts.cpu.model,
        cpu_cores=facts.cpu.usable or os.cpu_count() or 1,
        memory_bytes=facts.memory.total_bytes or 0,
        devices=[device.model or device.name or "unknown" for device in facts.devices],
        facts=facts,
    )


def _write_toolkit_versions(folder: Path, software: Software) -> None:
    """Write rocm_version.txt and cuda_version.txt if such a toolkit or driver is installed."""
    if software.rocm:
        write_text(folder / "rocm_version.txt", software.rocm + "\n")
    if software.cuda or software.nvidia_driver:
        text = f"toolkit {software.cuda or 'none'}\ndriver {software.nvidia_driver or 'none'}\n"
        write_text(folder / "cuda_version.txt", text)

"""The engine of a run and its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """The engine and its devices, for reports and manifests."""

    backend: str
    """Name of the framework."""
    library: str
    """Package that trains: ``torchtitan``."""
    version: str
    """Its version."""
    device_name: str
    """Model of the device of this process."""
    device_type: str
    """``cpu``, ``cuda``, or what the engine calls it."""
    num_devices: int
    """Of all processes together."""
    data_size: int
    """Data-parallel size: replicas of the model that share a global batch."""
    threads: int | None = None
    """Threads of the host that compute."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of further packages, by name."""
    compiles: bool = False
    """Whether the first step of each attempt compiles, which takes longer."""

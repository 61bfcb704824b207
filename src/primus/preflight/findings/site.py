"""Expectations of a site for each of its nodes: the file of `--expect`, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from primus.config import source
from primus.config.written_records import convert_tree
from primus.errors import PrimusError
from primus.runs.files import write_text

UNLIMITED = "unlimited"


class GpuExpectation(Struct, frozen=True, kw_only=True):
    """The devices of a node."""

    count: int | None = None
    """GPUs."""
    model: str | None = None
    memory_gib: float | None = None
    """Of each GPU; 1 % less is accepted, as driver versions count reserved memory or not."""
    partition_mode: str | None = None
    firmware: dict[str, tuple[str, ...]] = {}
    """Accepted versions by firmware: ``vbios``, ``mec``."""


class NicExpectation(Struct, frozen=True, kw_only=True):
    """The RDMA devices of a node that count (see --rdma-nic-allowlist)."""

    count: int | None = None
    rate_gbps: float | None = None
    """Of every port."""
    firmware: dict[str, tuple[str, ...]] = {}
    """Accepted versions by HCA type: ``MT4129``."""


class SoftwareExpectation(Struct, frozen=True, kw_only=True):
    """Accepted versions."""

    os: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    amd_driver: tuple[str, ...] = ()
    nvidia_driver: tuple[str, ...] = ()
    rocm: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ()


class MemoryExpectation(Struct, frozen=True, kw_only=True):
    """Host memory."""

    total_gib: float | None = None
    """As the kernel counts it; 1 % less is accepted, as kernels reserve different amounts."""
    dimms: int | None = None
    dimm_gib: float | None = None
    """Size of every module."""
    dimm_mts: int | None = None
    """Configured speed of every module, which only root can read."""
    bandwidth_gb_per_s: float | None = None
    """Least triad bandwidth of the whole host, measured with `--level soak`."""


class CpuExpectation(Struct, frozen=True, kw_only=True):
    """The processors."""

    model: str | None = None
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    numa_nodes: int | None = None


class MountExpectation(Struct, frozen=True, kw_only=True):
    """One mounted file system."""

    type: tuple[str, ...] = ()
    """Accepted types: ``lustre``, ``nfs4``."""
    source: str | None = None
    """What is mounted: ``filer:/export``."""
    options: tuple[str, ...] = ()
    """Options that must be set: ``rw``, ``flock``."""
    min_free_gib: float | None = None


class LimitExpectation(Struct, frozen=True, kw_only=True):
    """Least limits of a process; ``unlimited`` demands that there is none."""

    memlock_gib: float | str | None = None
    nofile: int | str | None = None
    shm_gib: float | None = None


class SiteExpectations(Struct, frozen=True, kw_only=True):
    """Everything that a node of the site must have; a value that is not specified is not checked."""

    gpus: GpuExpectation = GpuExpectation()
    nics: NicExpectation = NicExpectation()
    software: SoftwareExpectation = SoftwareExpectation()
    memory: MemoryExpectation = MemoryExpectation()
    cpu: CpuExpectation = CpuExpectation()
    mounts: dict[str, MountExpectation] = {}
    """By mount point."""
    limits: LimitExpectation = LimitExpectation()


def load(path: Path) -> SiteExpectations:
    """The expectations in a YAML file.

    Raises:
        UsageError: A key is unknown, or a value has the wrong type; names the line and the nearest key.
    """
    hint = "`preflight --write-expect FILE` writes an example"
    return convert_tree(source.read_yaml(path, None), SiteExpectations, hint)


def save(site: SiteExpectations, path: Path) -> None:
    """Write `site` as a file that `load` reads; unset values are omitted.

    Raises:
        PrimusError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, source.dump_yaml(_strip_unset_values(site)))
    except OSError as error:
        raise PrimusError(f"--write-expect {path}: {error.strerror}", "choose a file that can be written") from None


def _strip_unset_values(value: Any) -> Any:
    """Plain values without unset ones; a single accepted version is a plain value, not a list."""
    if isinstance(value, Struct):
        pairs = ((name, _strip_unset_values(item)) for name, item in structs.asdict(value).items())
        return {name: item for name, item in pairs if item not in (None, {}, ())}
    if isinstance(value, dict):
        return {name: _strip_unset_values(item) for name, item in value.items()}
    if isinstance(value, tuple) and value:
        return value[0] if len(value) == 1 else list(value)
    return value

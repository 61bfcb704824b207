"""Expectations of a site for each of its nodes: the file of `--expect`, and how it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, structs

from primus.config import source
from primus.config.source import Leaf, Tree
from primus.errors import PrimusError, UsageError, did_you_mean
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
    site: SiteExpectations = _read_struct(source.read_yaml(path, None), SiteExpectations)
    return site


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


def _read_struct(tree: Tree, kind: type[Struct]) -> Any:
    """A Struct of `kind` from the keys of `tree`."""
    hints, values = get_type_hints(kind), {}
    for key, item in tree.items():
        if key not in hints:
            longer = [name for name in hints if name.startswith(key)]  # suggests gpus, not cpu, for gpu
            raise UsageError(f"{locate_item(item)}: unknown key '{key}'", did_you_mean(key, longer or hints))
        values[key] = _convert_item(item, hints[key], key)
    return kind(**values)


def _convert_item(item: Leaf | Tree, hint: Any, key: str) -> Any:
    inner = _find_mapping_reader(hint)
    if inner is not None and not isinstance(item, Leaf):
        return inner(item, key)
    if inner is not None or not isinstance(item, Leaf):
        wanted = "a mapping" if inner is not None else "a value"
        raise UsageError(
            f"{locate_item(item)}: {key} is not {wanted}", "`preflight --write-expect FILE` writes an example"
        )
    if hint == tuple[str, ...]:
        return _parse_versions(item)
    text_wanted = hint in (str, str | None)
    value = item.text or str(item.value) if text_wanted and item.value is not None else item.value
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise UsageError(f"{item.origin}: {key}: {error}") from None


def _find_mapping_reader(hint: Any) -> Callable[[Tree, str], Any] | None:
    """The function that converts a mapping into a value of the type `hint`; None if the type does not use mappings."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        return lambda tree, _: _read_struct(tree, hint)
    if get_origin(hint) is dict:
        kind = get_args(hint)[1]
        return lambda tree, key: {name: _convert_item(item, kind, f"{key}.{name}") for name, item in tree.items()}
    return None


def _parse_versions(item: Leaf) -> tuple[str, ...]:
    """Versions as text: YAML reads 28.39 as a number."""
    if isinstance(item.value, list):
        return tuple(str(entry) for entry in item.value)
    return (item.text or str(item.value),)


def locate_item(item: Leaf | Tree) -> str:
    """Position of an item in the file; a mapping has the position of its first value."""
    while not isinstance(item, Leaf):
        if not item:
            return "an empty mapping"
        item = next(iter(item.values()))
    return item.origin

"""NVIDIA GPUs from the driver's library on the running machine, otherwise from its files (/proc/driver/nvidia/gpus) and
the PCI bus."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations

from msgspec import structs

from primus.machine import pci, profile
from primus.machine.device_sources import Sourced, build_device
from primus.machine.devices import MIG
from primus.machine.facts import Device, Link, Partition, PcieLink
from primus.machine.nvidia.nvml import NvidiaReading, read_nvml
from primus.machine.profile import Profile
from primus.machine.tree import FileTree

GPUS = "proc/driver/nvidia/gpus"
CAPABILITIES = "proc/driver/nvidia/capabilities"
"""Holds a folder gpuMINOR/mig/giN/ciN for each compute instance of a MIG GPU (NVIDIA MIG user guide, device nodes)."""
LIBRARY = "libnvidia-ml.so.1"
SWITCH = -1
"""The peer of a link that does not lead to a GPU: on most servers an NVSwitch that connects all GPUs."""


def read_gpus(
    tree: FileTree, functions: Iterable[pci.PciFunction], library: str = LIBRARY
) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """The GPUs by their addresses, and the NVLink connections between them; MIG instances are not counted as GPUs."""
    functions = [function for function in functions if function.vendor == pci.NVIDIA]
    folders = sorted(tree.list_names(GPUS))
    readings, source = (read_nvml(tree, library) if tree.may_ask and (folders or functions) else None), "nvml"
    if readings is None:
        readings, source = [_read_driver_file(tree, folder) for folder in folders], "proc"
    readings = _fill_addresses(readings, [function.bdf for function in functions] or folders)
    devices = [_build_gpu(tree, index, reading, source, functions) for index, reading in enumerate(readings)]
    known = {reading.bdf for reading in readings if not reading.is_lost}
    lost = {reading.bdf for reading in readings if reading.is_lost}
    for function in functions:
        if pci.normalize_address(function.bdf) not in known:
            why = (
                "its driver does not list it: the GPU failed, fell off the bus or is not accessible"
                if known
                else "the nvidia driver is not loaded"
            )
            tree.note_problem(f"{pci.DEVICES}/{function.bdf}", f"an NVIDIA device on the bus, but {why}")
            if pci.normalize_address(function.bdf) in lost:
                continue
            unknown = NvidiaReading(bdf=pci.normalize_address(function.bdf))
            devices.append(_build_gpu(tree, len(devices), unknown, "pci", functions))
    return tuple(devices), _build_links(readings)


def _fill_addresses(readings: Sequence[NvidiaReading], addresses: Iterable[str]) -> list[NvidiaReading]:
    """The readings; lost GPUs, for which the driver gives no address, get the remaining addresses.

    Both are in the order of addresses, which is NVML's.
    """
    known = {reading.bdf for reading in readings}
    free = iter(
        sorted({address for name in addresses if (address := pci.normalize_address(name)) not in known and address})
    )
    return [structs.replace(each, bdf=next(free, None)) if each.is_lost else each for each in readings]


def _build_gpu(
    tree: FileTree, index: int, reading: NvidiaReading, source: str, functions: Sequence[pci.PciFunction]
) -> Device:
    on_bus = {pci.normalize_address(function.bdf): function for function in functions}.get(reading.bdf)
    device_id = reading.device_id or (on_bus.device if on_bus else None)
    known, by = _find_profile(device_id, reading.name), "pci" if device_id else source
    memory = reading.memory_bytes
    found: Sourced = {
        "model": (known.model if known else None, by),
        "name": (reading.name, source),
        "device_id": (device_id, source if reading.device_id else "pci"),
        "bdf": (reading.bdf, source),
        "uuid": (reading.uuid, source),
        "architecture": (reading.architecture or (known.architecture if known else None), source),
        "memory_bytes": (memory, source),
        "partition_mode": (_find_mig_mode(tree, reading), "proc"),
        "fabric": (reading.fabric, source),
        "numa_node": (pci.read_numa_node(tree, on_bus.bdf) if on_bus else None, "pci"),
        "pci_path": (pci.find_pci_path(tree, on_bus.bdf) if on_bus else (), "pci"),
        "pcie": (pci.read_slowest_link(tree, on_bus.bdf) if on_bus else PcieLink(), "pci"),
        "firmware": ({"vbios": reading.vbios} if reading.vbios else {}, source),
    }
    parts = (Partition(index=index, bdf=reading.bdf, memory_bytes=memory, uuid=reading.uuid),)
    return build_device(index, "nvidia", found, () if source == "pci" or reading.is_lost else parts)


def _find_mig_mode(tree: FileTree, reading: NvidiaReading) -> str | None:
    """MIG if the GPU has compute instances; these files number GPUs by their device minor."""
    folder = next((name for name in tree.list_names(GPUS) if pci.normalize_address(name) == reading.bdf), None)
    text = (tree.read_text(f"{GPUS}/{folder}/information") or "") if folder else ""
    minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
    if not minor:
        return None
    instances = f"{CAPABILITIES}/gpu{minor[1]}/mig"
    parts = [f"{instances}/{name}" for name in tree.list_names(instances) if name.startswith("gi")]
    return MIG if any(name.startswith("ci") for part in parts for name in tree.list_names(part)) else None


def _find_profile(device_id: int | None, name: str) -> Profile | None:
    """The profile by the device id; by the name only without an id."""
    return (
        profile.find_profile_by_id("nvidia", device_id)
        if device_id is not None
        else profile.find_profile_by_name(name)
        if name
        else None
    )


def _read_driver_file(tree: FileTree, folder: str) -> NvidiaReading:
    lines = [line.partition(":") for line in (tree.read_text(f"{GPUS}/{folder}/information") or "").splitlines()]
    values = {key.strip(): value.strip() for key, _, value in lines}
    if not values:
        tree.note_problem(f"{GPUS}/{folder}/information", "does not describe the device")
    if values.get("GPU Excluded") == "Yes":
        tree.note_problem(f"{GPUS}/{folder}", "the driver excludes this device")
    uuid = values.get("GPU UUID", "")
    return NvidiaReading(
        bdf=pci.normalize_address(values.get("Bus Location", "")) or pci.normalize_address(folder),
        name=values.get("Model", ""),
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
        vbios=values["Video BIOS"] if "?" not in values.get("Video BIOS", "?") else None,
    )


def _build_links(readings: Sequence[NvidiaReading]) -> tuple[Link, ...]:
    """Connections from GPU to GPU, directly or through the switch."""
    index = {reading.bdf: number for number, reading in enumerate(readings)}
    ends = [[index.get(peer, SWITCH) for peer in reading.peers] for reading in readings]
    found = []
    for first, second in combinations(range(len(readings)), 2):
        count = ends[first].count(second) or min(ends[first].count(SWITCH), ends[second].count(SWITCH))
        if count:
            found.append(Link(kind="nvlink", first=first, second=second, num_links=count))
    return tuple(found)

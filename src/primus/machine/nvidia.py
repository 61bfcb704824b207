"""NVIDIA cards from the driver's library (NVML) on the running machine, else from its files and the PCI bus.

NVML is called through ctypes (NVML API reference, nvml.h); the files are those of /proc/driver/nvidia/gpus.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from itertools import combinations

from msgspec import Struct

from primus.machine import pci, profile, topology
from primus.machine.facts import Device, Link, Partition, PcieLink
from primus.machine.profile import Profile
from primus.machine.sourced import Sourced, device
from primus.machine.tree import Tree

GPUS = "proc/driver/nvidia/gpus"
LIBRARY = "libnvidia-ml.so.1"
LIMIT_S = 5.0
"""A driver that is stuck answers never."""
MAX_LINKS = 18
"""NVLinks of a card: NVML_NVLINK_MAX_LINKS."""
SWITCH = -1
"""Stands for whatever a link leads to that is no card: on the usual servers a switch that joins all cards."""


class Reading(Struct, frozen=True, kw_only=True):
    """What NVML, or the driver's file, says of one card."""

    bdf: str | None
    name: str = ""
    uuid: str | None = None
    device_id: int | None = None
    memory_bytes: int | None = None
    architecture: str | None = None
    vbios: str | None = None
    peers: tuple[str, ...] = ()
    """Address of what each active NVLink leads to."""


def cards(
    tree: Tree, functions: Iterable[pci.Function], library: str = LIBRARY
) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """The cards by their addresses, and the NVLink connections between them; parts of a card (MIG) are no cards."""
    functions = [function for function in functions if function.vendor == pci.NVIDIA]
    folders = sorted(tree.names(GPUS))
    readings, source = (nvml(tree, library) if tree.may_ask and (folders or functions) else None), "nvml"
    if readings is None:
        readings, source = [_file(tree, folder) for folder in folders], "proc"
    devices = [_card(tree, index, reading, source, functions) for index, reading in enumerate(readings)]
    known = {reading.bdf for reading in readings}
    for function in functions:
        if pci.address(function.bdf) not in known:
            why = (
                "its driver shows none there: it failed, fell off or may not be read"
                if known
                else "nvidia is not loaded"
            )
            tree.note(f"{pci.DEVICES}/{function.bdf}", f"an NVIDIA device on the bus, but {why}")
            unknown = Reading(bdf=pci.address(function.bdf))
            devices.append(_card(tree, len(devices), unknown, "pci", functions))
    return tuple(devices), _links(readings)


def _card(tree: Tree, index: int, reading: Reading, source: str, functions: Sequence[pci.Function]) -> Device:
    on_bus = {pci.address(function.bdf): function for function in functions}.get(reading.bdf)
    device_id = reading.device_id or (on_bus.device if on_bus else None)
    known, by = _profile(device_id, reading.name), "pci" if device_id else source
    memory = reading.memory_bytes
    found: Sourced = {
        "model": (known.model if known else None, by),
        "name": (reading.name, source),
        "device_id": (device_id, source if reading.device_id else "pci"),
        "bdf": (reading.bdf, source),
        "uuid": (reading.uuid, source),
        "architecture": (reading.architecture or (known.architecture if known else None), source),
        "memory_bytes": (memory, source),
        "numa_node": (pci.numa_node(tree, on_bus.bdf) if on_bus else None, "pci"),
        "pci_path": (topology.pci_path(tree, on_bus.bdf) if on_bus else (), "pci"),
        "pcie": (pci.link(tree, on_bus.bdf) if on_bus else PcieLink(), "pci"),
        "firmware": ({"vbios": reading.vbios} if reading.vbios else {}, source),
    }
    parts = (Partition(index=index, bdf=reading.bdf, memory_bytes=memory, uuid=reading.uuid),)
    return device(index, "nvidia", found, () if source == "pci" else parts)


def _profile(device_id: int | None, name: str) -> Profile | None:
    """By the id; by the name only where there is no id."""
    return profile.by_id("nvidia", device_id) if device_id is not None else profile.by_name(name) if name else None


def _file(tree: Tree, folder: str) -> Reading:
    lines = [line.partition(":") for line in (tree.text(f"{GPUS}/{folder}/information") or "").splitlines()]
    values = {key.strip(): value.strip() for key, _, value in lines}
    if not values:
        tree.note(f"{GPUS}/{folder}/information", "says nothing of the device")
    if values.get("GPU Excluded") == "Yes":
        tree.note(f"{GPUS}/{folder}", "the driver excludes this device")
    uuid = values.get("GPU UUID", "")
    return Reading(
        bdf=pci.address(values.get("Bus Location", "")) or pci.address(folder),
        name=values.get("Model", ""),
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
        vbios=values["Video BIOS"] if "?" not in values.get("Video BIOS", "?") else None,
    )


def _links(readings: Sequence[Reading]) -> tuple[Link, ...]:
    """Connections from card to card, and through the switch that all others lead to."""
    index = {reading.bdf: number for number, reading in enumerate(readings)}
    ends = [[index.get(peer, SWITCH) for peer in reading.peers] for reading in readings]
    found = []
    for first, second in combinations(range(len(readings)), 2):
        count = ends[first].count(second) or min(ends[first].count(SWITCH), ends[second].count(SWITCH))
        if count:
            found.append(Link(kind="nvlink", first=first, second=second, num_links=count))
    return tuple(found)


def nvml(tree: Tree, library: str = LIBRARY) -> list[Reading] | None:
    """What NVML says of each card; None, and a problem, where it cannot be asked or does not answer in time."""
    found: list[Reading] = []
    problem: list[str] = ["gave no answer in 5 s"]

    def ask() -> None:
        try:
            found.extend(_Nvml(library).readings())
            problem.clear()
        except (OSError, AttributeError, _NvmlError) as error:
            problem[:] = [str(error)]

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LIMIT_S)
    if problem:
        tree.note(library, problem[0])
        return None
    return found


class _NvmlError(Exception):
    """A call of NVML failed."""


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("legacy_bus_id", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_and_vendor", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """The library, opened and initialised."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise _NvmlError(f"{name} failed with code {code}")

    def readings(self) -> list[Reading]:
        try:
            count = ctypes.c_uint()
            self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
            return [self.reading(index) for index in range(count.value)]
        finally:
            self.library.nvmlShutdown()

    def reading(self, index: int) -> Reading:
        device, info, memory = ctypes.c_void_p(), _PciInfo(), _Memory()
        self.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        self.call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info))
        self.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
        return Reading(
            bdf=pci.address(info.bus_id.decode(errors="replace")),
            name=self.text("nvmlDeviceGetName", device) or "",
            uuid=self.text("nvmlDeviceGetUUID", device),
            device_id=info.device_and_vendor >> 16,
            memory_bytes=memory.total,
            architecture=f"sm{major.value}{minor.value}",
            vbios=self.text("nvmlDeviceGetVbiosVersion", device),
            peers=tuple(self.peers(device)),
        )

    def text(self, name: str, device: ctypes.c_void_p) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        code = getattr(self.library, name)(device, buffer, ctypes.c_uint(len(buffer)))
        return None if code else buffer.value.decode(errors="replace")

    def peers(self, device: ctypes.c_void_p) -> Iterable[str]:
        """A link that is not there, or not active, leads nowhere."""
        for link in range(MAX_LINKS):
            is_active, info = ctypes.c_uint(), _PciInfo()
            code = self.library.nvmlDeviceGetNvLinkState(device, ctypes.c_uint(link), ctypes.byref(is_active))
            if code or not is_active.value:
                continue
            if not self.library.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, ctypes.c_uint(link), ctypes.byref(info)):
                yield pci.address(info.bus_id.decode(errors="replace")) or "unknown"

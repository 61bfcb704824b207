"""What the NVIDIA driver's library says of the cards, called through ctypes (NVML API reference, nvml.h)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

from primus.machine import pci
from primus.machine.nvidia import Reading
from primus.machine.tree import Tree

LIMIT_S = 5.0
"""A driver that is stuck answers never."""
MAX_LINKS = 18
"""NVLinks of a card: NVML_NVLINK_MAX_LINKS."""


def readings(tree: Tree, library: str) -> list[Reading] | None:
    """What NVML says of each card; None, and a problem, where it cannot be asked or does not answer in time."""
    found: list[Reading] = []
    problem: list[str] = [f"gave no answer in {LIMIT_S:g} s"]

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

"""State of the GPUs from the NVIDIA driver's library, called through ctypes (NVML API reference, nvml.h)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import Struct

from primus.machine import pci
from primus.machine.tools.vitals import BANKS, Process, RowRemapping, Vitals
from primus.machine.tree import FileTree

LIMIT_S = 30.0
"""Without persistence mode the first call loads the driver, which takes seconds for each GPU; a call into a
hung driver never returns."""
MAX_LINKS = 18
"""NVLinks of a GPU: NVML_NVLINK_MAX_LINKS."""
MAX_PROCESSES = 512
FABRIC_COMPLETED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED: the GPU is registered with the fabric."""
NOT_AVAILABLE = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE, as a number of 64 bits."""
NOT_SUPPORTED = 3
"""NVML_ERROR_NOT_SUPPORTED: this GPU has no such value; GB10 has no separate memory."""
ERRORS = {
    1: "the library is not initialized",
    2: "an argument is invalid",
    NOT_SUPPORTED: "not supported",
    4: "no permission",
    6: "not found",
    8: "external power cables are not attached",
    9: "the driver is not loaded",
    10: "the time limit was reached",
    11: "a GPU interrupt does not work",
    13: "the library does not have this function",
    14: "the infoROM is corrupted",
    15: "the GPU is lost: it fell off the bus or is not reachable",
    16: "the GPU needs a reset",
    17: "the operating system or a cgroup blocked the GPU",
    18: "library and driver versions differ",
    20: "not enough memory",
    999: "an internal error of the driver",
}
"""nvmlReturn_t (nvml.h)."""


class NvidiaReading(Struct, frozen=True, kw_only=True):
    """One GPU as NVML, or the driver's file, describes it."""

    bdf: str | None
    name: str = ""
    uuid: str | None = None
    device_id: int | None = None
    memory_bytes: int | None = None
    architecture: str | None = None
    vbios: str | None = None
    peers: tuple[str, ...] = ()
    """Peer address of each active NVLink."""
    fabric: str | None = None
    """Id of its NVLink domain with GPUs of other nodes."""
    is_lost: bool = False
    """Whether the driver lists the GPU but cannot reach it."""


def read_nvml(tree: FileTree, library: str) -> list[NvidiaReading] | None:
    """NVML's reading of each GPU; None, with a problem, if NVML is not available or does not respond in time.

    A GPU that failed is reported as a problem and hides no other GPU: its reading holds what is still known.
    """
    return _ask_devices(tree, library, _NvmlLibrary.read_device)


def read_nvml_vitals(tree: FileTree, library: str) -> dict[str, Vitals]:
    """Live values of each GPU that responds, by its address."""
    found = _ask_devices(tree, library, _NvmlLibrary.read_vitals) or []
    return {bdf: values for bdf, values in found if bdf is not None}


Answer = TypeVar("Answer")


def _ask_devices(tree: FileTree, library: str, of_gpu: Callable[[_NvmlLibrary, int], Answer]) -> list[Answer] | None:
    """`of_gpu` of each GPU, in a thread that is abandoned if the driver hangs."""
    # The thread writes these lists and the caller reads them. `failure` starts with the timeout message, which
    # remains if the thread does not return; only a complete answer clears it. A late write changes nothing: the
    # caller has returned its result by then.
    found: list[Answer] = []
    # `problems` is separate from `failure`: a failed GPU is a problem of this GPU, and the answer remains valid.
    problems: list[str] = []
    failure: list[str] = [f"no response within {LIMIT_S:g} s"]

    def ask() -> None:
        try:
            found.extend(_NvmlLibrary(library, problems).read_devices(of_gpu))
            failure.clear()
        except (OSError, AttributeError, _NvmlError) as error:
            failure[:] = [str(error)]

    # A thread, since a call into a hung driver cannot be interrupted; as a daemon it does not delay the exit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LIMIT_S)
    for problem in problems[:]:  # a copy: a hung call may still append
        tree.note_problem(library, problem)
    reasons = failure[:]  # a copy: a late answer may still clear it
    if reasons:
        tree.note_problem(library, reasons[0])
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


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, version 3 of the function."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Banks(ctypes.Structure):
    """nvmlRowRemapperHistogramValues_t."""

    _fields_ = tuple((level, ctypes.c_uint) for level in BANKS)


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


class _NvmlLibrary:
    """The library, loaded and initialized; `problems` collects failures of single GPUs."""

    def __init__(self, library: str, problems: list[str]) -> None:
        # ctypes releases the interpreter lock during a call, so a hung call does not stop the waiting thread.
        self.library = ctypes.CDLL(library)
        self.problems = problems
        self.require_function("nvmlInit_v2")

    def call_function(self, name: str, *arguments: object) -> int:
        """Return code of a call; FUNCTION_NOT_FOUND (13) if the library is too old to have the function."""
        function = getattr(self.library, name, None)
        return 13 if function is None else int(function(*arguments))

    def require_function(self, name: str, *arguments: object) -> None:
        code = self.call_function(name, *arguments)
        if code:
            raise _NvmlError(f"{name} failed: {_explain_code(code)}")

    def read_devices(self, of_gpu: Callable[[_NvmlLibrary, int], Answer]) -> list[Answer]:
        # NVML counts initializations: each nvmlInit of the constructor is paired with a shutdown, also after an
        # error.
        try:
            count = ctypes.c_uint()
            self.require_function("nvmlDeviceGetCount_v2", ctypes.byref(count))
            return [of_gpu(self, index) for index in range(count.value)]
        finally:
            self.call_function("nvmlShutdown")

    def read_device(self, index: int) -> NvidiaReading:
        device, info, memory = ctypes.c_void_p(), _PciInfo(), _Memory()
        # A lost GPU has no handle: the other GPUs are read nevertheless, and nvidia.py assigns its address.
        if not self.has_value(index, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)):
            return NvidiaReading(bdf=None, is_lost=True)
        has_address = self.has_value(index, "nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info))
        has_memory = self.has_value(index, "nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return NvidiaReading(
            bdf=pci.normalize_address(info.bus_id.decode(errors="replace")) if has_address else None,
            name=self.read_text("nvmlDeviceGetName", device) or "",
            uuid=self.read_text("nvmlDeviceGetUUID", device),
            device_id=info.device_and_vendor >> 16 if has_address else None,
            memory_bytes=memory.total if has_memory else None,
            architecture=self.read_architecture(index, device),
            vbios=self.read_text("nvmlDeviceGetVbiosVersion", device),
            peers=tuple(self.list_link_peers(device)),
            fabric=self.read_fabric(device),
        )

    def read_vitals(self, index: int) -> tuple[str | None, Vitals]:
        """Address and live values of a GPU; unsupported values are None."""
        device, info, memory = ctypes.c_void_p(), _PciInfo(), _Memory()
        if self.call_function("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)):
            return None, Vitals()
        if self.call_function("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info)):
            return None, Vitals()
        code = self.call_function("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        corrected, uncorrected = (self.read_ecc_errors(device, kind) for kind in (0, 1))
        return pci.normalize_address(info.bus_id.decode(errors="replace")), Vitals(
            temperature_c=self.read_count("nvmlDeviceGetTemperature", device, ctypes.c_uint(0)),
            energy_j=self.read_energy(device),
            memory_used_bytes=memory.used if code == 0 else None,
            shares_host_memory=True if code == NOT_SUPPORTED else None,
            ecc_correctable=corrected,
            ecc_uncorrectable=uncorrected,
            remapping=self.read_remapping(device),
            processes=self.list_processes(device),
        )

    def read_count(self, name: str, *arguments: object) -> int | None:
        value = ctypes.c_uint()
        return None if self.call_function(name, *arguments, ctypes.byref(value)) else value.value

    def read_energy(self, device: ctypes.c_void_p) -> float | None:
        """Joules since the driver was loaded; the library counts in thousandths."""
        value = ctypes.c_ulonglong()
        code = self.call_function("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.byref(value))
        return None if code else value.value / 1e3

    def read_ecc_errors(self, device: ctypes.c_void_p, kind: int) -> int | None:
        """Corrected (0) or uncorrected (1) errors since the driver was loaded."""
        value = ctypes.c_ulonglong()
        volatile = ctypes.c_uint(0)
        code = self.call_function(
            "nvmlDeviceGetTotalEccErrors", device, ctypes.c_uint(kind), volatile, ctypes.byref(value)
        )
        return None if code else value.value

    def read_remapping(self, device: ctypes.c_void_p) -> RowRemapping | None:
        rows, banks = [ctypes.c_uint() for _ in range(4)], _Banks()
        if self.call_function("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, rows)):
            return None
        corrected, uncorrected, pending, failed = (row.value for row in rows)
        has_banks = self.call_function("nvmlDeviceGetRowRemapperHistogram", device, ctypes.byref(banks)) == 0
        return RowRemapping(
            corrected=corrected,
            uncorrected=uncorrected,
            is_pending=bool(pending),
            has_failed=bool(failed),
            banks={level: getattr(banks, level) for level in BANKS} if has_banks else {},
        )

    def list_processes(self, device: ctypes.c_void_p) -> tuple[Process, ...] | None:
        # The buffer has a fixed size: with more processes NVML returns INSUFFICIENT_SIZE, and the list is unknown.
        room, found = ctypes.c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
        if self.call_function("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(room), found):
            return None
        return tuple(
            Process(pid=each.pid, memory_bytes=None if each.memory == NOT_AVAILABLE else each.memory)
            for each in found[: room.value]
        )

    def has_value(self, index: int, name: str, *arguments: object) -> bool:
        """Whether a call for one GPU succeeded; failures are recorded, except that the GPU has no such value."""
        code = self.call_function(name, *arguments)
        if code not in (0, NOT_SUPPORTED):
            self.problems.append(f"GPU {index}: {name} failed: {_explain_code(code)}")
        return code == 0

    def read_architecture(self, index: int, device: ctypes.c_void_p) -> str | None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        places = (ctypes.byref(major), ctypes.byref(minor))
        has_answer = self.has_value(index, "nvmlDeviceGetCudaComputeCapability", device, *places)
        return f"sm{major.value}{minor.value}" if has_answer else None

    def read_text(self, name: str, device: ctypes.c_void_p) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        code = self.call_function(name, device, buffer, ctypes.c_uint(len(buffer)))
        return None if code else buffer.value.decode(errors="replace")

    def read_fabric(self, device: ctypes.c_void_p) -> str | None:
        """Cluster and clique of the NVLink domain; GPUs of both the same ids reach each other over nodes (MNNVL)."""
        info = _FabricInfo()
        code = self.call_function("nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(info))
        if code or info.status or info.state != FABRIC_COMPLETED:
            return None
        # Domains of one node, such as those of HGX H100, have a cluster of zeros.
        cluster = bytes(info.cluster)
        return f"{cluster.hex()}.{info.clique}" if any(cluster) else None

    def list_link_peers(self, device: ctypes.c_void_p) -> Iterable[str]:
        # Functions for links fail on GPUs without NVLink or for links that do not exist; both are skipped without a
        # problem.
        """Peer of each active link; `unknown` if the platform does not report it."""
        for link in range(MAX_LINKS):
            is_active, info = ctypes.c_uint(), _PciInfo()
            code = self.call_function("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(link), ctypes.byref(is_active))
            if code or not is_active.value:
                continue
            number, place = ctypes.c_uint(link), ctypes.byref(info)
            has_answer = self.call_function("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, number, place) == 0
            yield (pci.normalize_address(info.bus_id.decode(errors="replace")) if has_answer else None) or "unknown"


def _explain_code(code: int) -> str:
    return f"{ERRORS[code]} (code {code})" if code in ERRORS else f"code {code}"

"""Current state of the devices: temperature, power, errors and processes; from the kernel's files, then from tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field, structs

from primus.machine.amd import health as health_amd
from primus.machine.facts import Device, MachineFacts, MachineProblem
from primus.machine.nvidia import health as health_nvidia
from primus.machine.tools import smi
from primus.machine.tools.vitals import ToolCall, Vitals
from primus.machine.tree import FileTree

LIMIT_S = smi.LIMIT_S


class DeviceHealth(Vitals, frozen=True, kw_only=True):
    """Live values of one GPU of the facts."""

    index: int
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each value, by field."""


class Health(Struct, frozen=True, kw_only=True):
    """Live values of all GPUs, and the tools that were called."""

    devices: tuple[DeviceHealth, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[MachineProblem, ...] = ()
    """Files that could not be read."""


def read_health(
    facts: MachineFacts,
    environ: Mapping[str, str],
    timeout_s: float = LIMIT_S,
    *,
    root: Path = Path("/"),
    with_energy: bool = False,
) -> Health:
    """Live values of the GPUs of `facts`; tools run concurrently, so the call takes little more than `timeout_s`.

    Args:
        facts: The machine.
        environ: Variables for the tools.
        timeout_s: Of each tool.
        root: Root of the file system; with a root other than `/`, only files are read.
        with_energy: Ask NVML in any case, as nvidia-smi does not show energy.
    """
    tree = FileTree(root)
    devices = tuple(DeviceHealth(index=device.index) for device in facts.devices)
    calls: list[ToolCall] = []
    # Order of the sources: kernel files, then tools, then NVML. Each fills only values that the previous ones lack.
    for vendor, kind in (("amd", health_amd), ("nvidia", health_nvidia)):
        gpus = [device for device in facts.devices if device.vendor == vendor]
        if not gpus:
            continue
        devices = _fill_devices(devices, kind.read_kernel_vitals(tree, gpus), "kernel")
        if tree.is_live:
            for source, vitals, made in kind.read_tool_vitals(gpus, environ, timeout_s):
                devices, calls = _fill_devices(devices, vitals, source), [*calls, *made]
            # NVML is called in this process, where a hung driver cannot be killed: not if a tool has hung.
            is_needed = vendor == "nvidia" and (with_energy or _is_incomplete(devices, gpus))
            if is_needed and not _has_hung(calls, timeout_s):
                devices = _fill_devices(devices, health_nvidia.read_library_vitals(tree, gpus), "nvml")
    return Health(devices=devices, calls=tuple(calls), problems=tuple(tree.problems))


def _is_incomplete(devices: Sequence[DeviceHealth], gpus: Sequence[Device]) -> bool:
    """Whether the memory in use of some GPU with own memory is unknown."""
    indexes = {gpu.index for gpu in gpus}
    own = [device for device in devices if device.index in indexes]
    return any(device.memory_used_bytes is None and not device.shares_host_memory for device in own)


def _has_hung(calls: Sequence[ToolCall], timeout_s: float) -> bool:
    """Whether a tool was killed at the time limit; the driver's library would hang as well."""
    # A call that was killed at the limit has the limit as its duration (`process.run_command`, `ask_query`).
    return any(call.seconds >= timeout_s for call in calls)


def _fill_devices(
    devices: Sequence[DeviceHealth], found: Mapping[int, Vitals], source: str
) -> tuple[DeviceHealth, ...]:
    """The devices, with missing values filled in from a later source."""
    return tuple(_fill_device(device, found.get(device.index, Vitals()), source) for device in devices)


def _fill_device(device: DeviceHealth, vitals: Vitals, source: str) -> DeviceHealth:
    new = {
        name: value
        for name, value in structs.asdict(vitals).items()
        if value is not None and getattr(device, name) is None
    }
    return structs.replace(device, **new, sources={**device.sources, **dict.fromkeys(new, source)})

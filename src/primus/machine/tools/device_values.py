"""Completes the kernel's values with those of vendors' tools and torch, and records differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from primus.machine import pci, profile
from primus.machine.facts import Device, MachineProblem, Partition, Vendor
from primus.machine.tools import smi
from primus.machine.tree import FileTree

MEMORY_TOLERANCE = 0.01
"""Driver versions differ in whether they count reserved memory."""


def add_tool_values(
    tree: FileTree, devices: tuple[Device, ...], environ: Mapping[str, str], *, ask_all: bool
) -> tuple[tuple[Device, ...], dict[Vendor, str]]:
    """The devices completed by tools in their order of precedence, and driver versions.

    Args:
        ask_all: Whether to run tools even if no value is missing, to compare.
    """
    drivers: dict[Vendor, str] = {}
    limit_s = smi.LIMIT_S
    vendors: tuple[Vendor, ...] = (devices[0].vendor,) if devices else ("amd", "nvidia")
    for vendor in vendors:
        for source in smi.SOURCES[vendor]:
            # Evaluated before each tool: the first one usually completes the values, and torch takes seconds.
            is_wanted = ask_all or is_incomplete(tree, devices)
            is_other = devices and devices[0].vendor != vendor
            # torch completes devices but does not define them, since visibility variables limit what it lists.
            if not is_wanted or is_other or (source.tool == "torch" and not devices):
                continue
            readings, problems, is_slow = smi.ask_source(source, environ, limit_s)
            tree.problems += problems
            # A driver that hangs in one tool usually hangs in the next: the lower limit keeps the sum of all tools
            # short.
            limit_s = smi.AFTER_SLOW_LIMIT_S if is_slow else limit_s
            if readings and readings[0].driver:
                drivers.setdefault(vendor, readings[0].driver)
            devices = _merge_readings(tree, devices, readings) if devices else _build_devices(tree, vendor, readings)
    return devices, drivers


def is_incomplete(tree: FileTree, devices: Sequence[Device]) -> bool:
    """Whether an important value is missing: a device's model or memory, or, if the PCI bus is hidden, the devices."""
    if not devices:
        return not tree.list_names(pci.DEVICES)
    return any(
        (not device.model and not device.name) or device.memory_bytes is None for device in devices if device.partitions
    )


def _build_devices(tree: FileTree, vendor: Vendor, readings: Sequence[smi.ToolReading]) -> tuple[Device, ...]:
    """Devices that only a tool lists, as in a container without the kernel's files."""
    if readings:
        tree.problems.append(MachineProblem(readings[0].tool, "lists devices that the kernel's files do not"))
    bare = [
        Device(
            index=number,
            vendor=vendor,
            bdf=reading.bdf,
            partitions=(Partition(index=number, bdf=reading.bdf),),
            sources={"bdf": reading.tool} if reading.bdf else {},
        )
        for number, reading in enumerate(readings)
    ]
    return tuple(_merge_reading(tree, device, reading) for device, reading in zip(bare, readings, strict=True))


def _merge_readings(
    tree: FileTree, devices: tuple[Device, ...], readings: Sequence[smi.ToolReading]
) -> tuple[Device, ...]:
    matched = [(device, _find_reading(device, devices, readings)) for device in devices]
    if readings and all(reading.bdf for reading in readings) and readings[0].tool != "torch":
        _note_differences(tree, devices, readings)
    return tuple(_merge_reading(tree, device, reading) if reading else device for device, reading in matched)


def _note_differences(tree: FileTree, devices: Sequence[Device], readings: Sequence[smi.ToolReading]) -> None:
    """GPUs that only the kernel or only a tool lists; torch is not compared, since visibility variables limit it."""
    ours = {pci.strip_function(device.bdf) for device in devices if device.bdf and device.partitions}
    theirs = {pci.strip_function(reading.bdf) for reading in readings if reading.bdf}
    for slots, problem in ((ours - theirs, "does not list"), (theirs - ours, "is the only source that lists")):
        if slots:
            tree.problems.append(MachineProblem(readings[0].tool, f"{problem} the GPUs at {', '.join(sorted(slots))}"))


def _find_reading(
    device: Device, devices: Sequence[Device], readings: Iterable[smi.ToolReading]
) -> smi.ToolReading | None:
    """The reading of a device by its address; by index only if a tool gives no addresses and equal values for all,
    since the tools' orders differ."""
    readings = list(readings)
    by_address = next((reading for reading in readings if reading.bdf and reading.bdf == device.bdf), None)
    if by_address or any(reading.bdf for reading in readings) or len(readings) != len(devices):
        return by_address
    alike = len({(reading.name, reading.device_id, reading.memory_bytes) for reading in readings}) == 1
    return readings[device.index] if alike else None


def _merge_reading(tree: FileTree, device: Device, reading: smi.ToolReading) -> Device:
    """The device with missing values taken from the reading; differences are recorded as problems."""
    changes: dict[str, object] = {}
    for field in ("name", "device_id", "memory_bytes", "architecture", "numa_node"):
        mine, other = getattr(device, field), getattr(reading, field)
        if field == "memory_bytes" and len(device.partitions) > 1:
            continue  # versions of the tool report different partitions
        if mine in (None, ""):
            changes |= {field: other} if other is not None else {}
        elif other is not None and field != "name" and not _is_equal_value(field, mine, other):
            source = device.sources.get(field, "kernel")
            problem = f"{field} is {mine} by {source}, {other} by {reading.tool}"
            tree.problems.append(MachineProblem(f"GPU {device.index}", problem))
    merged = structs.replace(device, **changes)
    known = None if merged.model else _find_profile(merged)
    changes |= {"model": known.model} if known else {}
    sources = {**device.sources, **dict.fromkeys(changes, reading.tool)}
    if "memory_bytes" in changes and device.partitions:
        changes["partitions"] = (structs.replace(device.partitions[0], memory_bytes=reading.memory_bytes),)
    return structs.replace(device, **changes, sources=sources)


def _find_profile(device: Device) -> profile.Profile | None:
    """The profile by the device id; by the name only without an id."""
    if device.device_id is not None:
        return profile.find_profile_by_id(device.vendor, device.device_id)
    return profile.find_profile_by_name(device.name) if device.name else None


def _is_equal_value(field: str, mine: object, other: object) -> bool:
    if field == "memory_bytes" and isinstance(mine, int) and isinstance(other, int):
        return abs(mine - other) <= mine * MEMORY_TOLERANCE
    return mine == other

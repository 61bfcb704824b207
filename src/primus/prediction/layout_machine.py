"""The nodes that a layout is for: assumed ones, or as many as this machine."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.facts import MachineFacts


class LayoutMachine(Struct, frozen=True, kw_only=True):
    """Nodes that are alike."""

    name: str
    """Model of the devices, or ``CPU``."""
    nnodes: int
    devices_per_node: int
    device_bytes: int | None
    """Memory of each device; None where it is not known."""
    facts: MachineFacts | None = None
    """None for devices of which only the number is known."""
    model: str = ""
    """Of the devices, as `--assume` has it; empty where only their number is known."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.devices_per_node


def describe_machine(assume: str | None, facts: Callable[[], MachineFacts], nnodes: int) -> LayoutMachine:
    """The nodes that a command means: assumed ones, or as many as this machine.

    Raises:
        UsageError: The assumed model does not exist.
    """
    found = facts() if assume is None else build_assumed_machine(assume)
    sizes = [device.memory_bytes for device in found.devices if device.memory_bytes]
    host = [each for each in (found.memory.total_bytes, found.memory.limit_bytes) if each]
    # Devices with several dies are as many processes, each with its part of the memory.
    parts = [part.memory_bytes for device in found.devices for part in device.partitions if part.memory_bytes]
    count = sum(max(1, len(device.partitions)) for device in found.devices) or 1
    return LayoutMachine(
        name=str(found.model or "GPU") if found.devices else "CPU",
        nnodes=nnodes,
        devices_per_node=count,
        device_bytes=min(parts or sizes or ([] if found.devices else host), default=None),
        facts=found,
        model=(assume or str(found.model or "")).partition(":")[0].lower(),
    )

"""Build a device from values, each with its source."""

from __future__ import annotations

from primus.machine.facts import Device, Partition, PcieLink, Vendor

Sourced = dict[str, tuple[object, str]]
"""Value and source by field of a device."""
NOTHING: tuple[object, ...] = (None, "", {}, (), PcieLink())


def build_device(index: int, vendor: Vendor, found: Sourced, partitions: tuple[Partition, ...] = ()) -> Device:
    """The device with the values of `found`, and the sources of the values that are set."""
    return Device(
        index=index,
        vendor=vendor,
        partitions=partitions,
        sources={field: source for field, (value, source) in found.items() if value not in NOTHING},
        **{field: value for field, (value, _) in found.items()},  # type: ignore[arg-type]
    )

"""PCI functions from the kernel's files: vendor, link, NUMA node and path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct, structs

from primus.machine.facts import PcieLink
from primus.machine.tree import FileTree, parse_int

Number = TypeVar("Number", int, float)

DEVICES = "sys/bus/pci/devices"
AMD = 0x1002
NVIDIA = 0x10DE
ACCELERATOR_CLASSES = {AMD: (0x1200,), NVIDIA: (0x0300, 0x0302)}
"""Class and subclass of compute devices (pci.ids): processing accelerators of AMD, VGA and 3D controllers of
NVIDIA, whose switches are bridges."""
DISPLAY = 0x0380
"""Class of an Instinct MI100 or MI200 (RCCL tools/topo_expl/models), and of AMD's graphics cards; the device id
decides."""
PACKAGE_PORTS = {(0x1002, 0x14A0), (0x1022, 0x14C7), (0x1022, 0x1500)}
"""Vendor and device id of the upstream port of MI100, MI200 and MI300 packages (RCCL tools/topo_expl/models). The link
above it is the slot's; those below are inside the package, and report their full speed regardless of the speed of the
slot."""


class PciFunction(Struct, frozen=True):
    """A compute function of a GPU vendor."""

    bdf: str
    vendor: int
    device: int | None


def list_accelerators(tree: FileTree) -> tuple[PciFunction, ...]:
    """Compute functions of AMD and NVIDIA, with or without a driver, in the order of their addresses."""
    found = []
    for name in tree.list_names(DEVICES):
        vendor = tree.read_number(f"{DEVICES}/{name}/vendor")
        if vendor in ACCELERATOR_CLASSES:
            kind = (tree.read_number(f"{DEVICES}/{name}/class") or 0) >> 8
            device = tree.read_number(f"{DEVICES}/{name}/device")
            if kind in ACCELERATOR_CLASSES[vendor] or (vendor == AMD and kind == DISPLAY and _is_instinct(device)):
                found.append(PciFunction(name, vendor, device))
    return tuple(sorted(found, key=lambda function: function.bdf))


def _is_instinct(device: int | None) -> bool:
    from primus.machine import profile  # only if an AMD display controller is present

    return device is not None and profile.find_profile_by_id("amd", device) is not None


def find_failure(tree: FileTree, bdf: str, *, has_driver: bool) -> str | None:
    """Why a function cannot be used; None if nothing shows that, as for a GPU of another container or job.

    The bus is the same in every container and job, so that this tells a failed GPU from one that is not theirs.

    Args:
        tree: The machine.
        bdf: Address of the function.
        has_driver: Whether a driver lists it.
    """
    # An absent device answers each read with ones (PCI Local Bus Specification 3.0, 6.1): NVIDIA's Xid 79.
    if tree.read_bytes(f"{DEVICES}/{bdf}/config", 4) == b"\xff" * 4:
        return "it does not answer on the bus"
    if has_driver or tree.read_link_target(f"{DEVICES}/{bdf}/driver"):
        return None
    # A recorded machine, or a sandbox, may show no driver of any function.
    is_recorded = any(tree.read_link_target(f"{DEVICES}/{name}/driver") for name in tree.list_names(DEVICES))
    return "no driver is bound to it" if is_recorded else None


def read_slowest_link(tree: FileTree, bdf: str) -> PcieLink:
    """The slowest link between the root port and a function; unknown values are None.

    The path supports the minimum of what its ports support.
    """
    links = [_read_link_between(tree, upper, lower, bdf) for upper, lower in _read_links_above(tree, bdf)]
    known = [each for each in links if each.speed_gts and each.width]
    allowed = [each for each in links if each.max_speed_gts and each.max_width]
    if not known:
        return _read_link_at(tree, bdf)
    slowest = min(known, key=lambda each: (each.speed_gts or 0) * (each.width or 0))
    best = min(allowed, key=lambda each: (each.max_speed_gts or 0) * (each.max_width or 0), default=slowest)
    return structs.replace(slowest, max_speed_gts=best.max_speed_gts, max_width=best.max_width)


def _read_links_above(tree: FileTree, bdf: str) -> list[tuple[str | None, str]]:
    """Upper and lower port of each link between the root port and a function, starting at the function.

    On the way down port types alternate: a root port or a switch's downstream port, then a switch's upstream port or
    the device. Links inside a GPU's package are excluded."""
    parts = _find_whole_path(tree, bdf)
    depth = _count_package_depth(tree, parts)
    ports = parts[1:] if depth is None else parts[1 : depth + 1]
    if len(ports) % 2:
        return [(None, port) for port in reversed(ports)]
    return list(zip(ports[-2::-2], ports[::-2], strict=True)) or [(None, bdf)]


def _read_link_between(tree: FileTree, upper: str | None, lower: str, bdf: str) -> PcieLink:
    """A link as its lower port reports it, limited by what both ports support. A port whose speed or width differs from
    the other end's is emulated by a hypervisor and is ignored."""
    own = _read_link_at(tree, lower, port=None if lower == bdf else lower)
    above = _read_link_at(tree, upper, port=upper) if upper else PcieLink()
    if own.speed_gts is None or own.width is None:
        return above
    if (above.speed_gts, above.width) != (own.speed_gts, own.width):
        return own
    return structs.replace(
        own,
        max_speed_gts=_choose_smaller(own.max_speed_gts, above.max_speed_gts),
        max_width=_choose_smaller(own.max_width, above.max_width),
    )


def _read_link_at(tree: FileTree, bdf: str, port: str | None = None) -> PcieLink:
    folder = f"{DEVICES}/{bdf}"
    return PcieLink(
        speed_gts=_parse_speed(tree.read_text(f"{folder}/current_link_speed")),
        width=_parse_width(tree.read_text(f"{folder}/current_link_width")),
        max_speed_gts=_parse_speed(tree.read_text(f"{folder}/max_link_speed")),
        max_width=_parse_width(tree.read_text(f"{folder}/max_link_width")),
        port=port,
    )


def _choose_smaller(first: Number | None, second: Number | None) -> Number | None:
    return min((value for value in (first, second) if value is not None), default=None)


def read_numa_node(tree: FileTree, bdf: str) -> int | None:
    """NUMA node of a function; None if the firmware reports none (-1)."""
    node = tree.read_number(f"{DEVICES}/{bdf}/numa_node")
    return node if node is not None and node >= 0 else None


def find_pci_path(tree: FileTree, bdf: str) -> tuple[str, ...]:
    """Host bridge, bridges and the device: ``("pci0000:00", "0000:00:01.0", "0000:05:00.0")``; empty if unknown.

    Ports inside the device's own package are excluded.
    """
    parts = _find_whole_path(tree, bdf)
    depth = _count_package_depth(tree, parts)
    return parts if depth is None else (*parts[:depth], parts[-1])


def _find_whole_path(tree: FileTree, bdf: str) -> tuple[str, ...]:
    try:
        parts = (tree.root / DEVICES / bdf).readlink().parts
    except OSError:
        return ()
    roots = [i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[roots[0] :] if roots else ()


def _count_package_depth(tree: FileTree, parts: Sequence[str]) -> int | None:
    """Position in a path of the upstream port of the device's package; None without one."""
    for depth, port in enumerate(parts[:-1]):
        folder = f"{DEVICES}/{port}"
        if (tree.read_number(f"{folder}/vendor"), tree.read_number(f"{folder}/device")) in PACKAGE_PORTS:
            return depth
    return None


def normalize_address(text: str) -> str | None:
    """An address with a domain of four digits, from one with eight, four or none; None if `text` is not an address."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.strip().lower())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}" if match else None


def decode_location(location: int, domain: int = 0) -> str:
    """The address of bus, device and function in one number, as drivers keep them."""
    return f"{domain:04x}:{location >> 8 & 255:02x}:{location >> 3 & 31:02x}.{location & 7}"


def strip_function(bdf: str) -> str:
    """The address without its function; the same for all partitions of a GPU."""
    return bdf.rpartition(".")[0]


def _parse_speed(text: str | None) -> float | None:
    match = re.match(r"(\d+(?:\.\d+)?) ?GT/s", text or "")
    return float(match[1]) if match else None


def _parse_width(text: str | None) -> int | None:
    """Number of lanes; None if the kernel reports 0 or 255 (unknown)."""
    lanes = parse_int(text or "")
    return lanes if lanes and 0 < lanes < 255 else None

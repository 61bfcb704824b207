"""What the PCI bus says of a function: who made it, how it is linked, which NUMA node it is near."""

from __future__ import annotations

import re

from msgspec import Struct

from primus.machine.facts import PcieLink
from primus.machine.tree import Tree, as_int

DEVICES = "sys/bus/pci/devices"
AMD = 0x1002
NVIDIA = 0x10DE
ACCELERATOR_CLASSES = {AMD: (0x1200,), NVIDIA: (0x0300, 0x0302)}
"""Class and subclass of the devices that compute (pci.ids): an Instinct is a processing accelerator and no display;
a graphics card of AMD computes only if its driver says so, and NVIDIA's switches are bridges."""


class Function(Struct, frozen=True):
    """A PCI function of a GPU vendor that computes."""

    bdf: str
    vendor: int
    device: int | None


def accelerators(tree: Tree) -> tuple[Function, ...]:
    """Functions of AMD and NVIDIA that compute, whether a driver has them or not, in the order of their addresses."""
    found = []
    for name in tree.names(DEVICES):
        vendor = tree.number(f"{DEVICES}/{name}/vendor")
        if vendor in ACCELERATOR_CLASSES:
            kind = (tree.number(f"{DEVICES}/{name}/class") or 0) >> 8
            if kind in ACCELERATOR_CLASSES[vendor]:
                found.append(Function(name, vendor, tree.number(f"{DEVICES}/{name}/device")))
    return tuple(sorted(found, key=lambda function: function.bdf))


def link(tree: Tree, bdf: str) -> PcieLink:
    """The link of a function; values that the kernel does not know are None."""
    folder = f"{DEVICES}/{bdf}"
    return PcieLink(
        speed_gts=_speed(tree.text(f"{folder}/current_link_speed")),
        width=_width(tree.text(f"{folder}/current_link_width")),
        max_speed_gts=_speed(tree.text(f"{folder}/max_link_speed")),
        max_width=_width(tree.text(f"{folder}/max_link_width")),
    )


def numa_node(tree: Tree, bdf: str) -> int | None:
    """NUMA node of a function; None where the firmware names none (-1)."""
    node = tree.number(f"{DEVICES}/{bdf}/numa_node")
    return node if node is not None and node >= 0 else None


def path(tree: Tree, bdf: str) -> tuple[str, ...]:
    """Host bridge, bridges and the device: ``("pci0000:00", "0000:00:01.0", "0000:05:00.0")``; empty if not known."""
    try:
        parts = (tree.root / DEVICES / bdf).readlink().parts
    except OSError:
        return ()
    roots = [i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part]
    return parts[roots[0] :] if roots else ()


def address(text: str) -> str | None:
    """An address with a domain of four digits, from one with eight, four or none; None where `text` is no address."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.strip().lower())
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}" if match else None


def located(location: int, domain: int = 0) -> str:
    """The address of bus, device and function in one number, as drivers keep them."""
    return f"{domain:04x}:{location >> 8 & 255:02x}:{location >> 3 & 31:02x}.{location & 7}"


def slot(bdf: str) -> str:
    """The address without its function, which is one for all partitions of a card."""
    return bdf.rpartition(".")[0]


def _speed(text: str | None) -> float | None:
    match = re.match(r"(\d+(?:\.\d+)?) ?GT/s", text or "")
    return float(match[1]) if match else None


def _width(text: str | None) -> int | None:
    """Lanes; the kernel writes 0 or 255 where it does not know."""
    lanes = as_int(text or "")
    return lanes if lanes and 0 < lanes < 255 else None

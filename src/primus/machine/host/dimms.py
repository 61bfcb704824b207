"""Memory modules of the host: number, size and speed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from primus.machine.tree import FileTree

EDAC = "sys/devices/system/edac/mc"
"""One folder for each memory controller (Linux Documentation/admin-guide/RAS/main.rst)."""
BUS_BYTES = 8
"""Data width of a DDR4 channel, and of both subchannels of a DDR5 module together (JEDEC JESD79-4, JESD79-5)."""
MIB = 1 << 20
UNITS = {"MB": MIB, "GB": MIB << 10, "TB": MIB << 20, "MiB": MIB, "GiB": MIB << 10, "TiB": MIB << 20}
"""`dmidecode` prints binary sizes under decimal names (SMBIOS 3.6, 7.18.5)."""


class Dimm(Struct, frozen=True, kw_only=True):
    """One populated memory module."""

    slot: str
    size_bytes: int
    speed_mts: int | None = None
    """Megatransfers/s as configured; None if the source does not report it."""


def read_edac(tree: FileTree) -> list[Dimm]:
    """The modules listed by the kernel's memory controllers; empty without an EDAC driver."""
    return sorted(_read_edac_dimms(tree), key=lambda dimm: dimm.slot)


def _read_edac_dimms(tree: FileTree) -> Iterator[Dimm]:
    for controller in tree.list_names(EDAC):
        if not re.fullmatch(r"mc\d+", controller):
            continue
        for name in tree.list_names(f"{EDAC}/{controller}"):
            if not re.fullmatch(r"(dimm|rank)\d+", name):
                continue
            size_mib = tree.read_number(f"{EDAC}/{controller}/{name}/size")
            if size_mib:
                label = tree.read_text(f"{EDAC}/{controller}/{name}/dimm_label")
                yield Dimm(slot=label or f"{controller} {name}", size_bytes=size_mib * MIB)


def parse_dmidecode(text: str) -> list[Dimm]:
    """The modules in the output of ``dmidecode -t 17``, which needs root; empty slots are skipped."""
    blocks = (block for block in re.split(r"\n\s*\n", text) if "Memory Device\n" in f"{block}\n")
    return [dimm for block in blocks if (dimm := _parse_dimm(block)) is not None]


def _parse_dimm(block: str) -> Dimm | None:
    values = dict(re.findall(r"^\s*([^:\n]+):[ \t]*(.*?)[ \t]*$", block, re.MULTILINE))
    size = re.fullmatch(r"(\d+) (\w+)", values.get("Size", ""))
    if size is None or size[2] not in UNITS or int(size[1]) == 0:
        return None
    speed = re.match(r"(\d+) M(?:T/s|Hz)", values.get("Configured Memory Speed") or values.get("Speed") or "")
    return Dimm(
        slot=values.get("Locator", ""),
        size_bytes=int(size[1]) * UNITS[size[2]],
        speed_mts=int(speed[1]) if speed else None,
    )


def compute_peak_gb_per_s(dimms: list[Dimm]) -> float | None:
    """Bandwidth of all modules with one module per channel, 1e9 B/s; None if a speed is unknown."""
    speeds = [dimm.speed_mts for dimm in dimms]
    if not speeds or None in speeds:
        return None
    return sum(speed for speed in speeds if speed) * BUS_BYTES / 1e3

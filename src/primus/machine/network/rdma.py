"""RDMA devices (host channel adapters, HCAs) from the kernel's files, or from the output of the tools that list
them."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import structs

from primus import registry
from primus.machine import pci
from primus.machine.facts import Gid, MachineProblem, PcieLink, RdmaDevice, RdmaPort
from primus.machine.network.interfaces import read_uevent
from primus.machine.profile import Nic, load_nic
from primus.machine.tree import FileTree, build_sort_key
from primus.process import run_command

INFINIBAND = "sys/class/infiniband"
CXI = "sys/class/cxi"
"""Devices of HPE Slingshot 11, which are not InfiniBand devices (HewlettPackard/shs-cxi-driver)."""
TOOLS = (("ibstat",), ("ibv_devinfo", "-v"))
TOOL_LIMIT_S = 5.0
EMPTY_GIDS = 16
"""The kernel fills the lowest free entry of a GID table of up to 256 entries: no entry follows this many empty ones."""


def read_rdma_devices(tree: FileTree) -> tuple[RdmaDevice, ...]:
    """RDMA devices in natural order: mlx5_2 before mlx5_10. Tools are run only on the running machine, and
    only if the kernel's files show no device."""
    found = tuple(_read_device(tree, name) for name in tree.list_names(INFINIBAND))
    found += tuple(_read_slingshot_device(tree, name) for name in tree.list_names(CXI) if re.fullmatch(r"cxi\d+", name))
    return found or (_read_tools(tree) if tree.may_ask else ())


def find_nic_kind(vendor_id: int | None, name: str) -> str | None:
    """Name of the NIC plug-in that describes a device; the vendor decides, the name only if the vendor is unknown."""
    if vendor_id is not None:
        return _find_nic_kind(lambda nic: vendor_id in nic.vendor_ids)
    return _find_nic_kind(lambda nic: bool(nic.name_prefixes) and name.startswith(nic.name_prefixes))


def parse_rdma_devices(text: str, tool: str = "ibstat") -> tuple[tuple[RdmaDevice, ...], tuple[MachineProblem, ...]]:
    """Devices in the output of `ibstat`, `ibstatus` or `ibv_devinfo`, and the errors that the tool printed."""
    found: dict[str, RdmaDevice] = {}
    name, number = "", None
    problems = []
    for line in text.splitlines():
        if line.strip().startswith("ibpanic"):
            problems.append(MachineProblem(tool, line.strip()))
        start = _DEVICE.match(line)
        port = _PORT.match(line)
        if start:
            name = start[1] or start[2]
            found.setdefault(name, RdmaDevice(name=name, kind=find_nic_kind(None, name)))
        if start or port:
            number = int((start[3] if start else port and port[1]) or 0)
        elif name:
            found[name] = _merge_device_line(found[name], number or None, line)
    return tuple(sorted(found.values(), key=lambda device: build_sort_key(device.name))), tuple(problems)


def _find_nic_kind(matches: Callable[[Nic], bool]) -> str | None:
    nics = filter(None, map(load_nic, registry.list_plug_ins("nics")))
    return next((nic.kind for nic in nics if matches(nic)), None)


def _read_device(tree: FileTree, name: str) -> RdmaDevice:
    folder = f"{INFINIBAND}/{name}"
    bdf = read_uevent(tree, f"{folder}/device").get("PCI_SLOT_NAME")
    vendor_id = tree.read_number(f"{folder}/device/vendor")
    numa_node = tree.read_number(f"{folder}/device/numa_node")
    return RdmaDevice(
        name=name,
        kind=find_nic_kind(vendor_id, name),
        vendor_id=vendor_id,
        hca_type=tree.read_text(f"{folder}/hca_type"),
        firmware=tree.read_text(f"{folder}/fw_ver"),
        interface=next(iter(tree.list_names(f"{folder}/device/net")), None),
        bdf=bdf,
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        pci_path=pci.find_pci_path(tree, bdf) if bdf else (),
        pcie=pci.read_slowest_link(tree, bdf) if bdf else PcieLink(),
        ports=tuple(
            _read_port(tree, f"{folder}/ports", int(n)) for n in tree.list_names(f"{folder}/ports") if n.isdecimal()
        ),
    )


def _read_slingshot_device(tree: FileTree, name: str) -> RdmaDevice:
    """A Slingshot NIC, whose only port is a network interface too."""
    folder = f"{CXI}/{name}/device"
    bdf = read_uevent(tree, folder).get("PCI_SLOT_NAME") or pci.normalize_address(tree.read_link_target(folder) or "")
    interface = next(iter(tree.list_names(f"{folder}/net")), None)
    numa_node = tree.read_number(f"{folder}/numa_node")
    link = tree.read_text(f"{folder}/properties/link")
    is_up = link == "1" if link is not None else tree.read_text(f"sys/class/net/{interface}/operstate") == "up"
    speed_mbps = tree.read_number(f"{folder}/properties/speed")
    return RdmaDevice(
        name=name,
        kind=find_nic_kind(tree.read_number(f"{folder}/vendor"), name),
        vendor_id=tree.read_number(f"{folder}/vendor"),
        hca_type="Cassini",
        interface=interface,
        bdf=bdf,
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        pci_path=pci.find_pci_path(tree, bdf) if bdf else (),
        pcie=pci.read_slowest_link(tree, bdf) if bdf else PcieLink(),
        ports=(
            RdmaPort(
                state="ACTIVE" if is_up else "DOWN",
                physical_state="LinkUp" if is_up else "LinkDown",
                rate_gbps=speed_mbps / 1000 if speed_mbps else None,
                link_layer="Slingshot",
            ),
        ),
    )


def _read_port(tree: FileTree, folder: str, number: int) -> RdmaPort:
    folder = f"{folder}/{number}"
    return RdmaPort(
        number=number,
        state=_parse_state(tree.read_text(f"{folder}/state")),
        physical_state=_parse_word(tree.read_text(f"{folder}/phys_state")),
        rate_gbps=_parse_rate(tree.read_text(f"{folder}/rate")),
        link_layer=tree.read_text(f"{folder}/link_layer") or "unknown",
        gids=_read_gids(tree, folder),
    )


def _read_gids(tree: FileTree, folder: str) -> tuple[Gid, ...]:
    """Entries that are not all zero; the type file of an empty entry cannot be read."""
    found: list[Gid] = []
    for index in (int(name) for name in tree.list_names(f"{folder}/gids") if name.isdecimal()):
        # A node may have 8 or more ports with 256 entries each, so the rest of the table is not read.
        if index > (found[-1].index if found else 0) + EMPTY_GIDS:
            break
        gid = tree.read_text(f"{folder}/gids/{index}")
        if gid and gid.strip("0:"):
            found.append(Gid(index, gid, tree.read_text(f"{folder}/gid_attrs/types/{index}") or "unknown"))
    return tuple(found)


_STATES = {"INITIALIZING": "INIT"}


def _parse_word(text: str | None) -> str:
    """``LinkUp`` of ``5: LinkUp``."""
    return (text or "unknown").rpartition(": ")[2]


def _parse_state(text: str | None) -> str:
    """``ACTIVE`` of ``4: ACTIVE``, ``Active`` and ``PORT_ACTIVE (4)``."""
    if not text:
        return "unknown"
    word = _parse_word(text).partition(" ")[0].upper().removeprefix("PORT_")
    return _STATES.get(word, word)


def _parse_physical_state(text: str) -> str:
    """``LinkUp`` of ``5: LinkUp`` and ``LINK_UP (5)``."""
    word = _parse_word(text).partition(" ")[0]
    return "".join(part.capitalize() for part in word.split("_")) if word.isupper() else word


def _parse_rate(text: str | None) -> float | None:
    """Gigabit/s of ``400 Gb/sec (4X NDR)`` or ``400``."""
    match = re.match(r"\d+(\.\d+)?", text or "")
    return float(match[0]) if match else None


_DEVICE = re.compile(r"CA '(.+)'|(?:Infiniband device '|hca_id:\s*)([^'\s]+)(?:' port (\d+) status:)?")
_PORT = re.compile(r"\s+[Pp]ort\s?:?\s*(\d+):?$")


def _merge_device_line(device: RdmaDevice, number: int | None, line: str) -> RdmaDevice:
    """The device with one line of a tool's output about it, or about its port `number`."""
    key, _, value = (part.strip() for part in line.partition(":"))
    key = key.lower().replace("_", " ")
    if key in ("firmware version", "fw ver"):
        return structs.replace(device, firmware=value)
    if key == "ca type":
        return structs.replace(device, hca_type=value)
    if number is None:
        return device
    port = next((port for port in device.ports if port.number == number), RdmaPort(number=number))
    others = [other for other in device.ports if other.number != number]
    return structs.replace(
        device, ports=tuple(sorted([*others, _merge_port_line(port, key, value)], key=lambda p: p.number))
    )


def _merge_port_line(port: RdmaPort, key: str, value: str) -> RdmaPort:
    if key == "state":
        port = structs.replace(port, state=_parse_state(value))
        is_implied = port.state == "ACTIVE" and port.physical_state == "unknown"
        return structs.replace(port, physical_state="LinkUp") if is_implied else port  # no port is active without
    if key in ("physical state", "phys state"):
        return structs.replace(port, physical_state=_parse_physical_state(value))
    if key == "rate":
        return structs.replace(port, rate_gbps=_parse_rate(value))
    return structs.replace(port, link_layer=value) if key == "link layer" else port


def _read_tools(tree: FileTree) -> tuple[RdmaDevice, ...]:
    """Output of the first tool that lists a device, even if it fails: ibstat exits with 255 if one of many devices
    is lost."""
    for argv in TOOLS:
        # Each tool has a separate limit: after one that hangs on a device, the next may still list the others.
        answer = run_command(argv, limit_s=TOOL_LIMIT_S)
        if answer.state == "missing":
            continue
        # The output is parsed regardless of the exit code: a lost device makes the tool fail after it has listed the
        # others.
        found, problems = parse_rdma_devices(answer.text, argv[0])
        failure = MachineProblem(argv[0], answer.problem)
        tree.problems += problems + ((failure,) if answer.problem and failure not in problems else ())
        if found:
            return found
    return ()

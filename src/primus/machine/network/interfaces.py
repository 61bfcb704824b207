"""Network interfaces, their addresses, and the interface that routes to another host; without external tools."""

from __future__ import annotations

import fcntl
import ipaddress
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal, TypeVar

from msgspec import Struct

from primus.machine.facts import Interface
from primus.machine.tree import FileTree, parse_int

NET = "sys/class/net"
RESOLVE_LIMIT_S = 2.0
LOOPBACK, INFINIBAND = 772, 32
"""Hardware types (linux/if_arp.h)."""
UP, REJECT = 0x1, 0x200
"""Flags of a route (linux/route.h)."""

SIOCGIFCONF = 0x8912
"""Lists IPv4 addresses (netdevice(7))."""
IFREQ = struct.Struct("16s4x4s16x" if struct.calcsize("P") == 8 else "16s4x4s8x")
"""struct ifreq with a name and a sockaddr_in, in which the address follows family and port."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Lookup = Callable[[str], Iterable[str]]
Row = TypeVar("Row")
Kind = Literal["loopback", "ethernet", "infiniband", "bond", "bridge", "virtual"]


class Route(Struct, frozen=True):
    """An entry of the main routing table."""

    network: Network
    interface: str
    metric: int
    is_direct: bool
    """Whether the destination is reached without a gateway."""


def list_interfaces(tree: FileTree) -> tuple[Interface, ...]:
    """All interfaces of this network namespace, in the order of their names."""
    names = [name for name in tree.list_names(NET) if tree.list_names(f"{NET}/{name}")]  # bonding_masters is a file
    masters = {member: name for name in names for member in _list_members(tree, name)}
    addresses = _read_addresses(tree)
    return tuple(_read_interface(tree, name, masters.get(name), addresses.get(name, ())) for name in names)


def find_route(tree: FileTree, found: Iterable[Interface], master: str, lookup: Lookup | None = None) -> str | None:
    """Name of the interface by which `master` is reached, or that has its address if this node is the master.

    A loopback address, to which Debian resolves a host's own name, is the last resort.

    Args:
        tree: Whose routing table decides.
        found: Interfaces of the same machine.
        master: Host name or IP address.
        lookup: Resolves a name; abandoned after 2 s. By default the system's resolver on the running machine, and none
            on a recorded one.

    Returns:
        None if the name is unknown or has no route; the reason is then recorded as a problem of the tree.
    """
    holders = {parse_ip_address(address): interface.name for interface in found for address in interface.addresses}
    targets = _resolve_host(tree, master, lookup or (_look_up_host if tree.is_live else None))
    routes = [*_read_v4_routes(tree), *_read_v6_routes(tree)]
    ways = [holders.get(target) or _choose_interface(routes, target) for target in targets if not target.is_loopback]
    if any(ways):
        return next(way for way in ways if way)
    # Last, since a loopback address is a valid route only if all processes are on this node.
    if any(target.is_loopback for target in targets):
        return "lo"
    if targets:
        tree.note_problem("proc/net/route", f"no route to {master}")
    return None


def parse_ip_address(text: str) -> Address | None:
    """An IP address, also one in brackets or with a zone; None for anything else."""
    with suppress(ValueError):
        return ipaddress.ip_address(text.strip().removeprefix("[").removesuffix("]").partition("%")[0])
    return None


def read_uevent(tree: FileTree, folder: str) -> dict[str, str]:
    """The `KEY=value` lines of a kernel object's uevent file."""
    lines = (tree.read_text(f"{folder}/uevent") or "").splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _read_interface(tree: FileTree, name: str, master: str | None, addresses: Iterable[str]) -> Interface:
    folder = f"{NET}/{name}"
    has_device = bool(tree.list_names(f"{folder}/device"))
    device = read_uevent(tree, f"{folder}/device") if has_device else {}
    numa_node = tree.read_number(f"{folder}/device/numa_node") if has_device else None
    state = tree.read_text(f"{folder}/operstate") or "unknown"
    return Interface(
        name=name,
        kind=_find_interface_kind(tree, name, has_device=has_device),
        state=state,
        # Only while the interface is up: the kernel returns EINVAL for others.
        speed_mbps=_read_speed(tree, folder) if state == "up" else None,
        mtu=tree.read_number(f"{folder}/mtu"),
        addresses=tuple(addresses),
        master=tree.read_link_target(f"{folder}/master") or master,
        bdf=device.get("PCI_SLOT_NAME"),
        driver=device.get("DRIVER") or tree.read_link_target(f"{folder}/device/driver"),
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
    )


def _find_interface_kind(tree: FileTree, name: str, *, has_device: bool) -> Kind:
    folder = f"{NET}/{name}"
    hardware = tree.read_number(f"{folder}/type")
    if hardware == LOOPBACK:
        return "loopback"
    kind = read_uevent(tree, folder).get("DEVTYPE")
    if kind == "bond" or tree.list_names(f"{folder}/bonding"):
        return "bond"
    if kind == "bridge" or tree.list_names(f"{folder}/bridge"):
        return "bridge"
    if hardware == INFINIBAND:
        return "infiniband"
    return "ethernet" if has_device else "virtual"


def _list_members(tree: FileTree, name: str) -> list[str]:
    """Interfaces below a bond or a bridge."""
    return (tree.read_text(f"{NET}/{name}/bonding/slaves") or "").split() or tree.list_names(f"{NET}/{name}/brif")


def _read_speed(tree: FileTree, folder: str) -> int | None:
    """Speed in Mbit/s. Not read through the tree, since drivers without a speed fail the read, which is not a
    problem."""
    try:
        speed = parse_int((tree.root / folder / "speed").read_text(errors="replace"))
    except OSError:
        return None
    return speed if speed and speed > 0 else None


def _read_addresses(tree: FileTree) -> dict[str, list[str]]:
    """IPv4 addresses, then IPv6 ones, by interface."""
    found: dict[str, list[str]] = {}
    for name, address in [
        *(_read_live_v4_addresses() if tree.may_ask else _read_recorded_v4_addresses(tree)),
        *_read_v6_addresses(tree),
    ]:
        found.setdefault(name, []).append(address)
    return found


def _read_live_v4_addresses() -> list[tuple[str, str]]:
    """Entries that the kernel returns for SIOCGIFCONF: a name, possibly with a label after a colon, and an address
    each."""
    import socket  # takes 3 ms, and a dry run reads files only
    from array import array

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        size = 64 * IFREQ.size
        while True:
            # The kernel fills whole entries up to `size` and does not report truncation: a full buffer may be
            # incomplete, so the call is repeated with a larger one.
            buffer = array("B", bytes(size))
            wanted = struct.pack("iP", size, buffer.buffer_info()[0])
            (filled,) = struct.unpack_from("i", fcntl.ioctl(any_socket, SIOCGIFCONF, wanted))
            if filled < size:
                break
            size *= 4
    entries = IFREQ.iter_unpack(buffer.tobytes()[:filled])
    return [(name.split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address)) for name, address in entries]


def _read_recorded_v4_addresses(tree: FileTree) -> list[tuple[str, str]]:
    """Local addresses of the kernel's table, each with the interface whose network it is in; ambiguous
    addresses are skipped."""
    local: set[str] = set()
    leaf = ""
    for line in (tree.read_text("proc/net/fib_trie") or "").splitlines():
        leaf = line.strip(" |-") if "|-- " in line else leaf
        local |= {leaf} if line.strip() == "/32 host LOCAL" and parse_ip_address(leaf) else set()
    routes = [route for route in _read_v4_routes(tree) if route.is_direct and route.network.prefixlen]
    pairs = [
        ("lo" if address.startswith("127.") else _find_only_interface(routes, address), address)
        for address in sorted(local)
    ]
    return [(name, address) for name, address in pairs if name]


def _find_only_interface(routes: Iterable[Route], address: str) -> str | None:
    """The interface of the most specific networks that contain `address`, if it is unambiguous."""
    matching = [route for route in routes if ipaddress.ip_address(address) in route.network]
    narrowest = max((route.network.prefixlen for route in matching), default=0)
    names = {route.interface for route in matching if route.network.prefixlen == narrowest}
    return names.pop() if len(names) == 1 else None


def _read_v6_addresses(tree: FileTree) -> list[tuple[str, str]]:
    return _parse_rows(tree, "proc/net/if_inet6", lambda row: (row[5], str(ipaddress.IPv6Address(int(row[0], 16)))))


def _read_v4_routes(tree: FileTree) -> list[Route]:
    """Usable entries of proc/net/route, whose numbers are in host byte order (little endian)."""

    def read(row: list[str]) -> tuple[Route, int]:
        start, width = int.from_bytes(bytes.fromhex(row[1]), "little"), int(row[7], 16).bit_count()
        network = ipaddress.IPv4Network((start, width), strict=False)
        return Route(network, row[0], int(row[6]), is_direct=int(row[2], 16) == 0), int(row[3], 16)

    rows = _parse_rows(tree, "proc/net/route", read, header="Iface")
    return [route for route, flags in rows if _is_usable(flags)]


def _read_v6_routes(tree: FileTree) -> list[Route]:
    """Usable entries of proc/net/ipv6_route."""

    def read(row: list[str]) -> tuple[Route, int]:
        network = ipaddress.IPv6Network((int(row[0], 16), int(row[1], 16)), strict=False)
        return Route(network, row[9], int(row[5], 16), is_direct=int(row[4], 16) == 0), int(row[8], 16)

    return [route for route, flags in _parse_rows(tree, "proc/net/ipv6_route", read) if _is_usable(flags)]


def _parse_rows(tree: FileTree, path: str, read: Callable[[list[str]], Row], header: str = "") -> list[Row]:
    """Result of `read` for each line's words; a line that it cannot parse is recorded as a problem."""
    found = []
    for line in (tree.read_text(path) or "").splitlines():
        if header and line.startswith(header):
            continue
        try:
            found.append(read(line.split()))
        except (ValueError, IndexError):
            tree.note_problem(path, f"{line.strip()[:60]!r} cannot be parsed")
    return found


def _is_usable(flags: int) -> bool:
    return bool(flags & UP) and not flags & REJECT


def _choose_interface(routes: Iterable[Route], target: Address) -> str | None:
    """Interface of the most specific network that contains `target`; the smaller metric wins."""
    matching = [route for route in routes if target in route.network]
    best = max(matching, key=lambda route: (route.network.prefixlen, -route.metric), default=None)
    return best.interface if best else None


def _resolve_host(tree: FileTree, master: str, lookup: Lookup | None) -> list[Address]:
    """Addresses of a host, IPv4 before IPv6."""
    address = parse_ip_address(master)
    if address:
        return [address]
    if lookup is None:
        tree.note_problem("etc/hosts", f"host names ('{master}') are not resolved for a recorded machine")
        return []
    addresses = [address for text in _resolve_in_time(lookup, master) if (address := parse_ip_address(text))]
    if not addresses:
        tree.note_problem("etc/resolv.conf", f"'{master}' could not be resolved within {RESOLVE_LIMIT_S:g} s")
    return sorted(addresses, key=lambda address: address.version)


def _resolve_in_time(lookup: Lookup, name: str) -> list[str]:
    """Result of `lookup` within the time limit."""
    import threading

    found: list[str] = []
    # State: `found` is empty until the lookup returns. After the limit the thread may still run and extend the list,
    # so the caller gets a copy.
    thread = threading.Thread(
        target=lambda: found.extend(lookup(name)), daemon=True
    )  # a daemon: getaddrinfo cannot be interrupted
    thread.start()
    thread.join(RESOLVE_LIMIT_S)
    return list(found)


def _look_up_host(name: str) -> list[str]:
    """Addresses of a name in the resolver's order."""
    # Runs in the thread of _resolve_in_time: the resolver may retry unreachable name servers for a minute.
    import socket

    with suppress(OSError, UnicodeError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []

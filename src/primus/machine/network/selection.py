"""Chooses the interface and RDMA ports of a launch, and checks those that the user chose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, structs

from primus.machine import profile
from primus.machine.facts import Interface, MachineFacts, RdmaDevice, RdmaPort
from primus.machine.network.interfaces import parse_ip_address
from primus.machine.tree import build_sort_key, parse_int

EXPECTED_VARIABLE = "PRIMUS_EXPECT_IB"
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
CHOICES = (*SOCKET_VARIABLES, "NCCL_IB_HCA")
"""Variables by which a user selects interfaces and RDMA ports."""
INSIDE = re.compile(r"lo$|(docker|veth|br-|virbr|cni|flannel|cali)")
"""Prefixes of interfaces that reach only containers and virtual machines of this host (AMD-AGI/Primus base_env.sh)."""

UNKNOWN = "the network of an assumed machine is unknown: interface and RDMA ports are chosen on the node"

Port = tuple[RdmaDevice, RdmaPort]


class Network(Struct, frozen=True, kw_only=True):
    """The choice for one node; None and empty values are not set."""

    interface: str | None = None
    """Interface for NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, never an address."""
    hcas: tuple[str, ...] = ()
    """Entries of NCCL_IB_HCA, which starts with ``=`` for exact matches: ``mlx5_0:1``, ``mlx5_3:1``."""
    gid_index: int | None = None
    """NCCL_IB_GID_INDEX, if no NIC profile sets it."""
    nic_kind: str | None = None
    """NIC profile of the chosen ports."""
    ports: tuple[tuple[str, int], ...] = ()
    """Device and number of each chosen port; also on a single node, where no variable is set."""
    excluded: tuple[tuple[str, str], ...] = ()
    """Ports and interfaces that were not chosen, with reasons."""
    warnings: tuple[str, ...] = ()
    reasons: dict[str, str] = {}
    """Reasons, by field: ``interface``, ``hcas``, ``gid_index``, ``nic_kind``."""


def choose_network(
    facts: MachineFacts, nnodes: int, environ: Mapping[str, str], expected: int | None = None
) -> Network:
    """The interface to the master and the fastest active RDMA ports; on a single node nothing is set.

    Args:
        facts: Of this node, with `master_interface`.
        nnodes: Nodes of the launch.
        environ: The user's variables: PRIMUS_EXPECT_IB is a number of ports, or 1 for one per GPU (at least one);
            USING_AINIC=1 sets the kind of the NICs.
        expected: Number of ports; overrides PRIMUS_EXPECT_IB.
    """
    if facts.assumed:
        return _build_assumed_network(facts, nnodes, environ)
    ports, excluded = _list_data_ports(facts)
    names = tuple((device.name, port.number) for device, port in ports)
    kind, kind_reason = _find_nic_kind(ports, environ)
    if nnodes <= 1:
        one = Network(nic_kind=kind, ports=names, excluded=tuple(excluded))
        return one if not ports else _add_reasons(one, nic_kind=kind_reason)
    interface, way = _choose_master_interface(facts)
    nic = profile.load_nic(kind) if kind else None
    verbs = ports if nic is None or nic.is_verbs else []
    gid_index, gid_reason, gid_warnings = _choose_gid_index(verbs, kind)
    wanted = expected if expected is not None else _count_expected_ports(facts, environ)
    network = Network(
        interface=interface,
        hcas=tuple(f"{device.name}:{port.number}" for device, port in verbs),
        gid_index=gid_index,
        nic_kind=kind,
        ports=names,
        excluded=(*excluded, *_list_bond_members(facts.interfaces)),
        warnings=(*([] if interface else [way]), *gid_warnings, *_find_count_warnings(facts, ports, wanted)),
    )
    rate = f"{ports[0][1].rate_gbps:g} Gb/s" if ports and ports[0][1].rate_gbps else "of unknown rate"
    hca_reason = f"the {len(ports)} active ports with the highest rate, {rate}" if verbs else "no RDMA port is active"
    if ports and not verbs:
        hca_reason = f"{kind} does not use verbs"
    return _add_reasons(
        network, interface=way if interface else "", hcas=hca_reason, gid_index=gid_reason, nic_kind=kind_reason
    )


def _build_assumed_network(facts: MachineFacts, nnodes: int, environ: Mapping[str, str]) -> Network:
    """The network of an assumed machine: the kind of its NICs, but not their names."""
    ports = [(device, port) for device in facts.rdma for port in device.ports]
    kind, _ = _find_nic_kind(ports, environ)
    return Network(
        nic_kind=kind,
        ports=tuple((device.name, port.number) for device, port in ports),
        warnings=(UNKNOWN,) if nnodes > 1 else (),
        reasons={"nic_kind": "--assume-nic"} if ports else {},
    )


def select_names(expression: str, names: Iterable[str]) -> list[str]:
    """The `names` that an expression of NCCL_SOCKET_IFNAME or NCCL_IB_HCA selects.

    ``^`` excludes, a following ``=`` requires exact names rather than prefixes, commas separate names, and an HCA may
    have a port after a colon; a name without a port selects all its ports (NCCL user guide, and parseStringList and
    matchIfList of its source: empty entries are ignored, and an empty list selects everything).
    """
    denies = expression.startswith("^")
    rest = expression.removeprefix("^")
    is_exact = rest.startswith("=")
    entries = [_split_entry(entry) for entry in rest.removeprefix("=").split(",")]
    entries = [entry for entry in entries if entry[0]]
    return [
        name for name in names if denies != (not entries or any(_is_selected_by(e, name, is_exact) for e in entries))
    ]


def validate_network_variables(environ: Mapping[str, str], facts: MachineFacts) -> tuple[str, ...]:
    """Problems of the interfaces and RDMA ports that the user's variables select; empty if there are none.

    Unknown values, as on an assumed machine, are not judged.
    """
    socket_values = [(name, environ[name]) for name in SOCKET_VARIABLES if environ.get(name)]
    found = [warning for pair in socket_values for warning in _find_interface_warnings(*pair, facts)]
    hcas = environ.get("NCCL_IB_HCA")
    return (*found, *(_find_hca_warnings(hcas, facts) if hcas else ()))


def _add_reasons(network: Network, **reasons: str) -> Network:
    return structs.replace(network, reasons={field: reason for field, reason in reasons.items() if reason})


def _list_data_ports(facts: MachineFacts) -> tuple[list[Port], list[tuple[str, str]]]:
    """The fastest active ports, and why others are excluded. If some ports share a PCI root with a GPU, ports that are
    known not to do so are for storage or management."""
    ports = [(device, port) for device in facts.rdma for port in device.ports]
    reasons = {(device.name, port.number): _explain_exclusion(device, port, facts.interfaces) for device, port in ports}
    usable = [(device, port) for device, port in ports if not reasons[device.name, port.number]]
    fastest = max((port.rate_gbps or 0 for _, port in usable), default=0)
    chosen = [pair for pair in usable if (pair[1].rate_gbps or 0) == fastest]
    for device, port in usable:
        if (device, port) not in chosen:
            reasons[device.name, port.number] = f"{port.rate_gbps or 0:g} of {fastest:g} Gb/s, not for data"
    roots = {gpu.pci_path[0] for gpu in facts.devices if gpu.pci_path}
    if any(device.pci_path and device.pci_path[0] in roots for device, _ in chosen):
        far = [(device, port) for device, port in chosen if device.pci_path and device.pci_path[0] not in roots]
        reasons |= {(device.name, port.number): "shares no PCI root with a GPU, not for data" for device, port in far}
        chosen = [pair for pair in chosen if pair not in far]
    excluded = [(f"{name}:{number}", reason) for (name, number), reason in reasons.items() if reason]
    return (
        sorted(chosen, key=lambda pair: (build_sort_key(pair[0].name), pair[1].number)),
        sorted(excluded, key=lambda pair: build_sort_key(pair[0])),
    )


def _explain_exclusion(device: RdmaDevice, port: RdmaPort, interfaces: Sequence[Interface]) -> str:
    """Why a port cannot carry data, apart from its rate; empty if it can."""
    if not port.is_active:
        return f"{port.state}, {port.physical_state}"
    bonds = {interface.name for interface in interfaces if interface.kind == "bond"}
    mine = next((interface for interface in interfaces if interface.name == device.interface), None)
    if "bond" in device.name or device.interface in bonds:
        return "a bond"
    return f"belongs to {mine.master}" if mine and mine.master in bonds else ""


def _choose_master_interface(facts: MachineFacts) -> tuple[str | None, str]:
    """The interface to the master, and the reason; None and a hint if no interface can be used."""
    name = facts.master_interface
    by_name = {interface.name: interface for interface in facts.interfaces}
    member = by_name.get(name or "")
    if member and member.master in by_name and by_name[member.master].kind == "bond":
        name = member.master
    if name is None and facts.files_only:
        return None, "a dry run resolves no names: the interface to the master is chosen on the node"
    if name is None:
        return None, "no interface has a known route to the master: NCCL_SOCKET_IFNAME is not set"
    if INSIDE.match(name):
        return None, (
            f"the route to the master uses {name}, which other nodes cannot reach: set MASTER_ADDR to an "
            "address of node 0 that all nodes reach"
        )
    return name, "route to the master"


def _list_bond_members(interfaces: Iterable[Interface]) -> Iterator[tuple[str, str]]:
    bonds = {interface.name for interface in interfaces if interface.kind == "bond"}
    yield from ((i.name, f"belongs to {i.master}") for i in interfaces if i.master in bonds)


def _find_nic_kind(ports: Sequence[Port], environ: Mapping[str, str]) -> tuple[str | None, str]:
    if environ.get("USING_AINIC") == "1":
        return "ainic", "USING_AINIC=1"
    kinds = Counter(device.kind for device, _ in ports if device.kind)
    if not kinds:
        return None, "no profile describes the NICs" if ports else ""
    kind, count = kinds.most_common(1)[0]
    return kind, f"{count} of {len(ports)} ports"


def _choose_gid_index(ports: Sequence[Port], kind: str | None) -> tuple[int | None, str, list[str]]:
    """The GID index that all Ethernet ports have for RoCE v2 over IPv4, why, and warnings.

    Only for mellanox; the profiles of other NICs set it.
    """
    ethernet = [pair for pair in ports if pair[1].link_layer == "Ethernet"]
    if not ethernet:
        return None, "InfiniBand needs none" if ports else "", []
    if kind != "mellanox":
        return None, f"set by the profile of {kind or 'the NICs'}", []
    indexes = {f"{device.name}:{port.number}": find_roce_v2_index(port) for device, port in ethernet}
    found = set(indexes.values())
    if found == {None}:
        return (
            None,
            "",
            ["no RDMA port has a RoCE v2 GID with an IPv4 address: check that its interface has an address"],
        )
    if len(found) > 1:
        listed = ", ".join(f"{name} {'none' if index is None else index}" for name, index in indexes.items())
        return None, "", [f"RoCE v2 GIDs are not at the same index on all ports ({listed}): NCCL_IB_GID_INDEX is unset"]
    return found.pop(), "RoCE v2 with IPv4 on all ports", []


def find_roce_v2_index(port: RdmaPort) -> int | None:
    """Lowest index of a RoCE v2 GID with an IPv4 address; None without one."""
    gids = (gid.index for gid in port.gids if gid.kind == "RoCE v2" and _is_ipv4(gid.gid))
    return min(gids, default=None)


def _is_ipv4(gid: str) -> bool:
    address = parse_ip_address(gid)
    return address is not None and address.version == 6 and address.ipv4_mapped is not None


def _count_expected_ports(facts: MachineFacts, environ: Mapping[str, str]) -> int | None:
    text = environ.get(EXPECTED_VARIABLE, "").strip()
    if text in ("1", "true", "yes"):
        return len(facts.devices) or 1
    number = parse_int(text) or 0
    return number if number > 0 else None


def _find_count_warnings(facts: MachineFacts, ports: Sequence[Port], expected: int | None) -> Iterator[str]:
    if expected is not None and len(ports) != expected:
        missing = _format_missing_ports(facts, ports) if len(ports) < expected else ""
        yield f"{len(ports)} of {expected} expected RDMA ports are active{missing}"
    elif not ports and (facts.rdma or facts.devices):
        yield f"no RDMA port is active: nodes use sockets, which is slow{_format_missing_ports(facts, ports)}"


def _format_missing_ports(facts: MachineFacts, ports: Sequence[Port]) -> str:
    """Ports that should be up: those of the chosen ports' type, or all if none was chosen or the type is unknown."""
    types = {device.hca_type for device, _ in ports if device.hca_type}
    alike = [device for device in facts.rdma if device.hca_type in types] if types else facts.rdma
    down = [f"{device.name} {port.physical_state}" for device in alike for port in device.ports if not port.is_active]
    return f": {', '.join(down)}" if down else ""


def _split_entry(entry: str) -> tuple[str, int | None]:
    """Name and port; as with C's atoi an invalid port is 0, and -1 is any port."""
    name, colon, text = entry.partition(":")
    match = re.match(r"\s*([+-]?\d{1,9})", text)
    port = int(match[1]) if match else 0
    return name, None if not colon or port == -1 else port


def _is_selected_by(entry: tuple[str, int | None], name: str, is_exact: bool) -> bool:
    wanted, wanted_port = entry
    own, own_port = _split_entry(name)
    if wanted_port is not None and own_port is not None and wanted_port != own_port:
        return False
    return own == wanted if is_exact else own.startswith(wanted)


def _find_interface_warnings(variable: str, value: str, facts: MachineFacts) -> Iterator[str]:
    addresses = _find_address_warnings(variable, value, facts)
    if addresses or not facts.interfaces:
        yield from addresses
        return
    names = [interface.name for interface in facts.interfaces]
    is_gloo = variable == "GLOO_SOCKET_IFNAME"  # Gloo and PyTorch match exact names only
    chosen = select_names(f"={value}" if is_gloo else value, names)
    if not chosen:
        yield f"{variable}={value} matches no interface; available: {', '.join(names)}"
    elif all(INSIDE.match(name) for name in chosen):
        yield f"{variable}={value} selects only {', '.join(chosen)}, which other nodes cannot reach"
    down = [i.name for i in facts.interfaces if i.name in chosen and i.state == "down" and not value.startswith("^")]
    if down:
        yield f"{variable}={value} selects {', '.join(down)}, which is down"


def _find_address_warnings(variable: str, value: str, facts: MachineFacts) -> list[str]:
    holders = {
        parse_ip_address(address): interface.name for interface in facts.interfaces for address in interface.addresses
    }
    found = []
    for entry in value.lstrip("^=").split(","):
        address = parse_ip_address(entry)
        if address:
            holder = f"; {holders[address]} holds it" if address in holders else ""
            thing = "an RDMA device" if variable == "NCCL_IB_HCA" else "an interface"
            found.append(f"{variable}={value}: {entry} is an IP address, not the name of {thing}{holder}")
    return found


def _find_hca_warnings(value: str, facts: MachineFacts) -> Iterator[str]:
    addresses = _find_address_warnings("NCCL_IB_HCA", value, facts)
    if addresses or not facts.rdma:
        yield from addresses
        return
    ports = {f"{device.name}:{port.number}": port for device in facts.rdma for port in device.ports}
    chosen = select_names(value, ports)
    if not chosen:
        yield f"NCCL_IB_HCA={value} matches no RDMA port; available: {', '.join(ports)}"
        return
    down = [
        f"{name} ({ports[name].state}, {ports[name].physical_state})" for name in chosen if not ports[name].is_active
    ]
    if down and (not value.startswith("^") or len(down) == len(chosen)):
        yield f"NCCL_IB_HCA={value} selects {', '.join(down)}, which is not active"

"""Checks of the network: RDMA ports, interfaces, the way to the other nodes, and what the environment says of it."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing

from primus.machine import network as machine_network
from primus.machine.facts import RdmaDevice, RdmaPort
from primus.preflight.finding import Finding
from primus.preflight.node import Node, info, judged, listed, ok, unknown

MOST_ADAPTERS = 3
LOW_RATE_GBPS = 100.0
"""Slower RDMA ports are management ports where faster ones are there (AMD-AGI/Primus node_smoke)."""
COUNTERS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "VL15_dropped")
HARDWARE_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err")
"""Files of counters/ and hw_counters/ that grow when a cable or a switch is bad (kernel ABI sysfs-class-infiniband)."""
WATCH_S = 1.0
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
VIRTUAL = re.compile(r"lo$|docker|veth|virbr|br-|cni|flannel|tunl|cali")
"""Interfaces that lead nowhere outside (AMD-AGI/Primus base_env.sh leaves out the same)."""


def counted_ports(node: Node) -> tuple[list[tuple[RdmaDevice, RdmaPort]], list[str]]:
    """The RDMA ports that a job would use, and the others with the reason why not.

    An allow-list decides, else NCCL_IB_HCA, else what is known of ports: disabled ones, members of a bond, and slow
    ones beside fast ones are for management. A slower port of the adapters that are fast is one of them, and degraded.
    """
    ports = [(device, port) for device in node.facts.rdma for port in device.ports]
    chosen = node.expected.rdma_nic_allowlist or node.environ.get("NCCL_IB_HCA")
    if chosen:
        names = machine_network.select(chosen, [f"{device.name}:{port.number}" for device, port in ports])
        kept = [(device, port) for device, port in ports if f"{device.name}:{port.number}" in names]
        return kept, [f"{_port_name(*pair)} (not in {chosen})" for pair in ports if pair not in kept]
    fastest = max((port.rate_gbps or 0 for _, port in ports), default=0)
    fast_kinds = {_kind(device) for device, port in ports if port.rate_gbps == fastest}
    bonded = {interface.name for interface in node.facts.interfaces if interface.kind == "bond" or interface.master}
    kept, left_out = [], []
    for device, port in ports:
        reason = ""
        if port.physical_state in ("Disabled", "Sleep"):
            reason = port.physical_state
        elif 0 < (port.rate_gbps or 0) < (LOW_RATE_GBPS if _kind(device) in fast_kinds else fastest):
            reason = f"{port.rate_gbps:g} of {fastest:g} Gb/s" if fastest >= LOW_RATE_GBPS else ""
        elif device.interface in bonded or "bond" in device.name:
            reason = "in a bond"
        if reason:
            left_out.append(f"{_port_name(device, port)} ({reason})")
        else:
            kept.append((device, port))
    return kept, left_out


def _kind(device: RdmaDevice) -> str | None:
    return device.hca_type or device.kind


def rdma(node: Node) -> Iterator[Finding]:
    """RDMA ports: as many as expected, active, equally fast, with a usable GID."""
    kept, left_out = counted_ports(node)
    asked, wanted = node.expected.rdma_nics, node.environ.get("PRIMUS_EXPECT_IB", "")
    source = "--expected-rdma-nics" if asked is not None else "$PRIMUS_EXPECT_IB"
    if asked is None and wanted.isdecimal() and int(wanted) > 1:
        asked = int(wanted)
    needs_rdma = wanted in ("1", "true", "yes")
    if left_out:
        yield info("network.rdma_excluded", listed(left_out), "an allow-list, NCCL_IB_HCA, or a management port")
    if asked is not None or needs_rdma or (node.facts.rdma and not kept):
        active = {device.name for device, port in kept if port.is_active}
        expected = str(asked) if asked is not None else "at least one"
        source = source if asked is not None or needs_rdma else "the node has RDMA devices"
        good = len(active) == asked if asked is not None else bool(active)
        yield judged(
            good,
            "fail",
            "network.rdma_count",
            f"{len(active)} active",
            expected,
            source,
            "`ibstat` or `rdma link` shows the ports; is /dev/infiniband in the container?",
            value=len(active),
        )
    elif not node.facts.rdma:
        yield info("network.rdma_count", "none", "nodes then talk over sockets", value=0)
    else:
        yield ok("network.rdma_count", f"{len(kept)} ports", "at least one", value=len(kept))
    fastest = max((port.rate_gbps or 0 for _, port in kept), default=0)
    for device, port in kept:
        yield from _port(device, port, fastest)


def _port(device: RdmaDevice, port: RdmaPort, fastest: float) -> Iterator[Finding]:
    subject = _port_name(device, port)
    rate = f", {port.rate_gbps:g} Gb/s" if port.rate_gbps else ""
    yield judged(
        port.is_active,
        "fail",
        "network.rdma_port",
        f"{port.state}, {port.physical_state}{rate}",
        "ACTIVE, LinkUp",
        "a job waits for every port that it counts on",
        "check the cable, the transceiver and the switch's port; leave it out with NCCL_IB_HCA or an allow-list",
        subject=subject,
    )
    if not port.is_active:
        return
    if (port.rate_gbps or 0) < fastest:
        yield judged(
            False,
            "fail",
            "network.rdma_rate",
            f"{port.rate_gbps or 0:g} Gb/s",
            f"{fastest:g} Gb/s",
            "as the node's other ports",
            "check the cable and the switch's port",
            subject=subject,
        )
    is_ethernet = port.link_layer == "Ethernet"
    usable = [gid for gid in port.gids if not is_ethernet or gid.kind == "RoCE v2"]
    indexes = ", ".join(str(gid.index) for gid in usable)
    yield judged(
        bool(usable),
        "fail",
        "network.gid",
        f"{'RoCE v2' if is_ethernet else 'valid'} at {indexes}" if usable else f"none of {len(port.gids)} is usable",
        "a RoCE v2 GID" if is_ethernet else "a valid GID",
        "connections between nodes are addressed by it",
        "give the interface an address; load rdma_cm",
        subject=subject,
    )


def _port_name(device: RdmaDevice, port: RdmaPort) -> str:
    return f"{device.name} port {port.number}"


Counters = dict[str, dict[str, int]]
"""Error counters by port and name."""


def read_counters(node: Node) -> Counters:
    """What the ports that count have counted since they came up."""
    found: Counters = {}
    for device, port in counted_ports(node)[0]:
        folder = f"sys/class/infiniband/{device.name}/ports/{port.number}"
        paths = [f"counters/{name}" for name in COUNTERS] + [f"hw_counters/{name}" for name in HARDWARE_COUNTERS]
        read = {path.partition("/")[2]: node.tree.number(f"{folder}/{path}") for path in paths}
        found[_port_name(device, port)] = {name: value for name, value in read.items() if value is not None}
    return found


def grown(before: Counters, after: Counters) -> Iterator[Finding]:
    """Errors that were counted between two readings."""
    for subject, counts in after.items():
        growth = {name: count - before.get(subject, {}).get(name, 0) for name, count in counts.items()}
        rising = [f"{name} +{count}" for name, count in growth.items() if count > 0]
        totals = [f"{name} {count}" for name, count in counts.items() if count]
        if counts:
            yield judged(
                not rising,
                "warn",
                "network.errors",
                listed(rising) or f"none new; since boot {listed(totals) or 'none'}",
                "none new",
                "a cable or a switch that loses packets",
                "clean or change the cable and the transceiver; watch the port",
                subject=subject,
            )


def error_counters(node: Node) -> Iterator[Finding]:
    """Errors that ports count while we look."""
    before = read_counters(node)
    if any(before.values()) and node.tree.is_live:
        time.sleep(WATCH_S)
    yield from grown(before, read_counters(node))


def expressions(node: Node) -> Iterator[Finding]:
    """Interfaces and adapters that the environment names are there and up."""
    for name in (*SOCKET_VARIABLES, "NCCL_IB_HCA"):
        text = node.environ.get(name)
        if not text:
            continue
        wrong = machine_network.validate({name: text}, node.facts)
        is_socket = name in SOCKET_VARIABLES
        yield judged(
            not wrong,
            "fail",
            "network.interface" if is_socket else "network.hca",
            "; ".join(wrong) or text,
            "interfaces that are up and lead outside" if is_socket else "active ports",
            "workers connect over what it selects",
            f"unset it, or name one of {listed(_candidates(node))}"
            if is_socket
            else "unset it, or name active ports of /sys/class/infiniband",
            subject=name,
        )


def _candidates(node: Node) -> list[str]:
    return [one.name for one in node.facts.interfaces if one.state != "down" and not VIRTUAL.match(one.name)]


def route(node: Node) -> Iterator[Finding]:
    """The way to the master goes over the chosen interface."""
    used = node.facts.master_interface
    is_here = (_address_of(node.layout.master_addr) or "").startswith(("127.", "::1"))
    if node.layout.nnodes == 1 or node.layout.node_rank == 0 or is_here:
        return
    reason = f"the way to {node.layout.master_addr}"
    if used is None:
        yield unknown(
            "network.route", "not known", "an interface that is up", reason, "`ip route get` for that address"
        )
        return
    chosen = node.environ.get("NCCL_SOCKET_IFNAME")
    yield judged(
        not chosen or bool(machine_network.select(chosen, [used])),
        "warn",
        "network.route",
        used,
        chosen or "any",
        reason,
        f"NCCL_SOCKET_IFNAME={used} takes the same way",
    )


def rendezvous(node: Node) -> Iterator[Finding]:
    """This node's name is known, and the port of the launch is free on node 0."""
    host = node.facts.host or socket.gethostname()
    reason = "workers find each other by name"
    if node.layout.nnodes > 1:
        name = node.layout.master_addr
        address = _address_of(name)
        yield judged(
            address is not None,
            "fail",
            "network.name",
            f"{name} is {address}" if address else f"{name} is unknown",
            "an address",
            reason,
            "use an address for --master-addr, or add the name to /etc/hosts",
            subject=name,
        )
    else:
        address = _address_of(host)
        yield judged(
            address is not None,
            "warn",
            "network.name",
            f"{host} is {address}" if address else f"{host} is unknown",
            "an address",
            reason,
            "add it to /etc/hosts",
            subject=host,
        )
    port = node.layout.master_port
    if port is not None and node.layout.node_rank == 0:
        yield judged(
            _is_free(port),
            "fail",
            "network.port",
            f"port {port} is {'free' if _is_free(port) else 'in use'}",
            "free",
            "nodes meet there",
            "choose another --master-port, the same on every node",
        )


def _address_of(name: str) -> str | None:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0])
    return None


def _is_free(port: int) -> bool:
    try:
        with closing(socket.create_server(("", port), reuse_port=False)):
            return True
    except OSError:
        return False


def interfaces(node: Node) -> Iterator[Finding]:
    """The interfaces that can carry traffic between nodes."""
    shown = [
        f"{one.name}{f' {one.speed_mbps / 1000:g} Gb/s' if one.speed_mbps else ''}"
        for one in node.facts.interfaces
        if one.name in _candidates(node)
    ]
    if node.layout.nnodes > 1:
        yield judged(
            bool(shown),
            "fail",
            "network.interfaces",
            listed(shown) or "none is up",
            "one that is up",
            "nodes talk over it",
            "`ip link` shows them; in a container use --network host",
        )
    else:
        yield info("network.interfaces", listed(shown) or "none is up")


def firmware(node: Node) -> Iterator[Finding]:
    """Adapters of one kind have one firmware."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for device in node.facts.rdma:
        if device.firmware:
            kinds.setdefault(device.hca_type or device.kind or "NIC", {}).setdefault(device.firmware, []).append(
                device.name
            )
    for kind, versions in sorted(kinds.items()):
        text = "; ".join(f"{version} on {listed(names, MOST_ADAPTERS)}" for version, names in sorted(versions.items()))
        yield judged(
            len(versions) == 1,
            "warn",
            "network.firmware",
            text,
            "one version",
            "adapters that differ behave differently",
            "flash the same firmware on all",
            subject=kind,
        )


def environment(node: Node) -> Iterator[Finding]:
    """Variables that contradict each other, or the machine."""
    said = sorted(_contradictions(node))
    for subject, problem, advice in said:
        yield judged(
            False,
            "warn",
            "network.environment",
            problem,
            "no contradiction",
            "what a worker inherits",
            advice,
            subject=subject,
        )
    if not said:
        yield ok("network.environment", "no contradiction", "no contradiction")


def _contradictions(node: Node) -> Iterator[tuple[str, str, str]]:
    env = node.environ
    is_off = env.get("NCCL_IB_DISABLE") == "1"
    if is_off and env.get("PRIMUS_EXPECT_IB") == "1":
        yield "NCCL_IB_DISABLE", "1 while PRIMUS_EXPECT_IB is 1", "unset one of them"
    if is_off and env.get("NCCL_IB_HCA"):
        yield "NCCL_IB_HCA", "set while NCCL_IB_DISABLE is 1", "unset one of them"
    nccl, gloo = env.get("NCCL_SOCKET_IFNAME"), env.get("GLOO_SOCKET_IFNAME")
    if nccl and gloo and nccl != gloo and not nccl.startswith(("^", "=")):
        yield "GLOO_SOCKET_IFNAME", f"{gloo} while NCCL_SOCKET_IFNAME is {nccl}", "use one interface for both"
    if env.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1") and node.layout.nnodes > 1:
        yield "MASTER_ADDR", f"{env['MASTER_ADDR']} with {node.layout.nnodes} nodes", "use the address of node 0"
    index = env.get("NCCL_IB_GID_INDEX")
    if index and index.isdecimal():
        lacking = [
            device.name
            for device, port in counted_ports(node)[0]
            if port.is_active and int(index) not in {gid.index for gid in port.gids}
        ]
        if lacking:
            yield (
                "NCCL_IB_GID_INDEX",
                f"{index}, which {listed(lacking)} does not have",
                "unset it, or name one that all have",
            )


CHECKS = (interfaces, rdma, error_counters, expressions, route, rendezvous, firmware, environment)

"""Checks of the network: interfaces, the route to the other nodes, and the related environment variables."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import closing

from primus.machine.network import selection as machine_network
from primus.machine.network.selection import INSIDE, SOCKET_VARIABLES
from primus.preflight.checks.ports import list_counted_ports
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import (
    PreflightNode,
    format_names,
    judge_value,
    report_info,
    report_ok,
    report_unknown,
)


def check_expressions(node: PreflightNode) -> Iterator[CheckFinding]:
    """Interfaces and NICs that the environment names exist and are up."""
    for name in (*SOCKET_VARIABLES, "NCCL_IB_HCA"):
        text = node.environ.get(name)
        if not text:
            continue
        wrong = machine_network.validate_network_variables({name: text}, node.facts)
        is_socket = name in SOCKET_VARIABLES
        yield judge_value(
            not wrong,
            "fail",
            "network.interface" if is_socket else "network.hca",
            "; ".join(wrong) or text,
            "interfaces that are up and not loopback" if is_socket else "active ports",
            "workers connect over the selected interface",
            f"unset it, or name one of {format_names(_list_candidates(node))}"
            if is_socket
            else "unset it, or name active ports of /sys/class/infiniband",
            subject=name,
        )


def _list_candidates(node: PreflightNode) -> list[str]:
    return [one.name for one in node.facts.interfaces if one.state != "down" and not INSIDE.match(one.name)]


def check_route(node: PreflightNode) -> Iterator[CheckFinding]:
    """The route to the master uses the chosen interface."""
    used = node.facts.master_interface
    is_here = (_resolve_address(node.layout.master_addr) or "").startswith(("127.", "::1"))
    # Node 0 reaches the master, which is itself, over loopback: that says nothing about the interface.
    if node.layout.nnodes == 1 or node.layout.node_rank == 0 or is_here:
        return
    reason = f"the route to {node.layout.master_addr}"
    if used is None:
        yield report_unknown(
            "network.route", "not known", "an interface that is up", reason, "`ip route get` for that address"
        )
        return
    chosen = node.environ.get("NCCL_SOCKET_IFNAME")
    yield judge_value(
        not chosen or bool(machine_network.select_names(chosen, [used])),
        "warn",
        "network.route",
        used,
        chosen or "any",
        reason,
        f"NCCL_SOCKET_IFNAME={used} uses the same route",
    )


def check_rendezvous(node: PreflightNode) -> Iterator[CheckFinding]:
    """The name of the master can be resolved, and the port of the launch is free on node 0."""
    has_others = node.layout.nnodes > 1
    name = node.layout.master_addr if has_others else node.facts.host or socket.gethostname()
    address = _resolve_address(name)
    yield judge_value(
        address is not None,
        "fail" if has_others else "warn",
        "network.name",
        f"{name} is {address}" if address else f"{name} is unknown",
        "an address",
        "workers find each other by name",
        "use an address for --master-addr, or add the name to /etc/hosts" if has_others else "add it to /etc/hosts",
        subject=name,
    )
    port = node.layout.master_port
    # Only node 0 listens on the port. The check closes its socket at once: the report exchange and the workers use
    # the port later.
    if port is not None and node.layout.node_rank == 0:
        is_free = _is_free(port)
        yield judge_value(
            is_free,
            "fail",
            "network.port",
            f"port {port} is {'free' if is_free else 'in use'}",
            "free",
            "the rendezvous uses it",
            "choose another --master-port, the same on every node",
        )


def _resolve_address(name: str) -> str | None:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0])
    return None


def _is_free(port: int) -> bool:
    # create_server sets SO_REUSEADDR, so that connections of an earlier run in TIME_WAIT do not count. With
    # SO_REUSEPORT the bind would also succeed while another process listens.
    try:
        with closing(socket.create_server(("", port), reuse_port=False)):
            return True
    except OSError:
        return False


def check_interfaces(node: PreflightNode) -> Iterator[CheckFinding]:
    """The interfaces that can carry traffic between nodes."""
    shown = [
        f"{one.name}{f' {one.speed_mbps / 1000:g} Gb/s' if one.speed_mbps else ''}"
        for one in node.facts.interfaces
        if one.name in _list_candidates(node)
    ]
    if node.layout.nnodes > 1:
        yield judge_value(
            bool(shown),
            "fail",
            "network.interfaces",
            format_names(shown) or "none is up",
            "one that is up",
            "nodes communicate over it",
            "`ip link` shows them; in a container use --network host",
        )
    else:
        yield report_info("network.interfaces", format_names(shown) or "none is up")


def check_environment(node: PreflightNode) -> Iterator[CheckFinding]:
    """Variables that contradict each other or the machine."""
    contradictions = sorted(_find_contradictions(node))
    for subject, problem, advice in contradictions:
        yield judge_value(
            False,
            "warn",
            "network.environment",
            problem,
            "no contradiction",
            "inherited by workers",
            advice,
            subject=subject,
        )
    if not contradictions:
        yield report_ok("network.environment", "no contradiction", "no contradiction")


def _find_contradictions(node: PreflightNode) -> Iterator[tuple[str, str, str]]:
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
            for device, port in list_counted_ports(node)[0]
            if port.is_active and int(index) not in {gid.index for gid in port.gids}
        ]
        if lacking:
            yield (
                "NCCL_IB_GID_INDEX",
                f"{index}, which {format_names(lacking)} does not have",
                "unset it, or name an interface that all nodes have",
            )


CHECKS = (check_interfaces, check_expressions, check_route, check_rendezvous, check_environment)

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
from primus.preflight.findings.node import PreflightNode, format_names
from primus.preflight.findings.rules import About, report_info


def check_expressions(node: PreflightNode) -> Iterator[CheckFinding]:
    """Interfaces and NICs that the environment names exist and are up."""
    for name in (*SOCKET_VARIABLES, "NCCL_IB_HCA"):
        text = node.environ.get(name)
        if text:
            wrong = machine_network.validate_network_variables({name: text}, node.facts)
            row, candidates = "network.interface" if name in SOCKET_VARIABLES else "network.hca", _list_candidates(node)
            shown = "; ".join(wrong) or text
            yield node.judge(row, not wrong, shown, About(name), candidates=format_names(candidates))


def _list_candidates(node: PreflightNode) -> list[str]:
    return [one.name for one in node.facts.interfaces if one.state != "down" and not INSIDE.match(one.name)]


def check_route(node: PreflightNode) -> Iterator[CheckFinding]:
    """The route to the master uses the chosen interface."""
    used, master = node.facts.master_interface, node.layout.master_addr
    is_here = (_resolve_address(master) or "").startswith(("127.", "::1"))
    # Node 0 reaches the master, which is itself, over loopback: that says nothing about the interface.
    if node.layout.nnodes == 1 or node.layout.node_rank == 0 or is_here:
        return
    if used is None:
        yield node.judge("network.route/unknown", False, master=master)
        return
    chosen = node.environ.get("NCCL_SOCKET_IFNAME")
    is_right = not chosen or bool(machine_network.select_names(chosen, [used]))
    yield node.judge("network.route", is_right, used, wanted=chosen or "any", master=master)


def check_rendezvous(node: PreflightNode) -> Iterator[CheckFinding]:
    """The name of the master can be resolved, and the port of the launch is free on node 0."""
    has_others = node.layout.nnodes > 1
    name = node.layout.master_addr if has_others else node.facts.host or socket.gethostname()
    address, row = _resolve_address(name), "network.name/master" if has_others else "network.name"
    shown = f"{name} is {address}" if address else f"{name} is unknown"
    yield node.judge(row, address is not None, shown, About(name))
    port = node.layout.master_port
    # Only node 0 listens on the port. The check closes its socket at once: the report exchange and the workers use
    # the port later.
    if port is not None and node.layout.node_rank == 0:
        yield node.judge("network.port", _is_free(port), port=port)


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
    names = _list_candidates(node)
    shown = format_names(
        f"{one.name}{f' {one.speed_mbps / 1000:g} Gb/s' if one.speed_mbps else ''}"
        for one in node.facts.interfaces
        if one.name in names
    )
    if node.layout.nnodes > 1:
        yield node.judge("network.interfaces", bool(shown), shown or "none is up")
    else:
        yield report_info("network.interfaces", shown or "none is up")


def check_environment(node: PreflightNode) -> Iterator[CheckFinding]:
    """Variables that contradict each other or the machine."""
    contradictions = sorted(_find_contradictions(node))
    for subject, problem, fix in contradictions:
        yield node.judge("network.environment", False, problem, About(subject), fix=fix)
    if not contradictions:
        yield node.judge("network.environment/none", True)


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

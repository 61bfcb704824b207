"""Measure RDMA bandwidth between the nodes of a preflight: node 0 leads, and every node runs perftest."""

from __future__ import annotations

import shutil
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from primus.machine.network import roce_v2_index
from primus.preflight import rdma_bandwidth, steps
from primus.preflight.finding import Finding
from primus.preflight.node import Node
from primus.preflight.perftest import LISTEN_LIMIT_S, PROGRAM, Rail, Reading, Server, send
from primus.preflight.ports import counted_ports
from primus.preflight.rdma_bandwidth import Inventory, Tournament, Transfer

SECONDS, QUICK_SECONDS = 5, 1
"""How long one transfer takes."""
SLACK_S = 20.0
"""For perftest's set-up, and for nodes to find each other."""

ARRIVAL_LIMIT_S = 300.0
"""Nodes come here from measurements of their own, of which that of slow folders takes longest."""


class Send(Struct, frozen=True, kw_only=True):
    """One transfer, as its sender is told."""

    rail: int
    address: str
    tcp_port: int


class Order(Struct, frozen=True, kw_only=True):
    """What a node shall do in one step: report itself, serve on some rails, or send."""

    asks_inventory: bool = False
    serves: tuple[int, ...] = ()
    """Rails; a rail may be there several times. All servers of earlier steps are ended."""
    sends: tuple[Send, ...] = ()


class Served(Struct, frozen=True, kw_only=True):
    """A server that waits, or why there is none."""

    tcp_port: int
    problem: str = ""


class Reply(Struct, frozen=True, kw_only=True):
    """What came of an order, in its order."""

    inventory: Inventory | None = None
    servers: tuple[Served, ...] = ()
    readings: tuple[Reading, ...] = ()


class Performer:
    """One node's part: its servers and clients. `close` ends what is left of them."""

    def __init__(self, node: Node, seconds: int) -> None:
        self._node, self._seconds = node, seconds
        self._rails = rails_of(node)
        self._servers: list[Server] = []

    def perform(self, order: Order) -> Reply:
        if order.asks_inventory:
            return Reply(inventory=self._inventory())
        if order.serves:
            self.close()
            self._servers = [Server(self._rails[rail], self._seconds, self._node.environ) for rail in order.serves]
            return Reply(servers=tuple(Served(tcp_port=one.tcp_port, problem=one.problem) for one in self._servers))
        with ThreadPoolExecutor(max(1, len(order.sends))) as pool:
            return Reply(readings=tuple(pool.map(self._send, order.sends)))

    def close(self) -> None:
        for server in self._servers:
            server.end()
        self._servers = []

    def _send(self, one: Send) -> Reading:
        limit_s = self._seconds + SLACK_S
        return send(self._rails[one.rail], one.address, one.tcp_port, self._seconds, self._node.environ, limit_s)

    def _inventory(self) -> Inventory:
        if not self._rails:
            return Inventory(problem="no active RDMA port")
        if shutil.which(PROGRAM, path=self._node.environ.get("PATH")) is None:
            return Inventory(problem=f"{PROGRAM} is not installed")
        return Inventory(address=_own_address(self._node), rails=self._rails)


def rails_of(node: Node) -> tuple[Rail, ...]:
    """The active ports that count, in their order."""
    active = [(device, port) for device, port in counted_ports(node)[0] if port.is_active]
    return tuple(
        Rail(
            index=index,
            hca=device.name,
            port=port.number,
            rate_gbps=port.rate_gbps,
            gid_index=roce_v2_index(port) if port.link_layer == "Ethernet" else None,
        )
        for index, (device, port) in enumerate(active)
    )


def _own_address(node: Node) -> str:
    """The address by which this node reaches the master, and the others reach this node."""
    layout = node.layout
    if layout.nnodes == 1:
        return "localhost"
    if layout.node_rank == 0:
        return layout.master_addr
    try:
        ways = socket.getaddrinfo(layout.master_addr, layout.master_port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = min(ways, key=lambda way: way[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def lead(
    node: Node, host: str, hosts: Mapping[int, str], say: Callable[[str], None], *, is_quick: bool = False
) -> list[Finding]:
    """Node 0: findings of all nodes."""
    seconds = QUICK_SECONDS if is_quick else SECONDS
    performer = Performer(node, seconds)
    try:
        with steps.Leader(node.layout, host, performer.perform, Reply, _limit_s(seconds), ARRIVAL_LIMIT_S) as leader:
            return _led(leader, node, hosts, say)
    finally:
        performer.close()


def _led(
    leader: steps.Leader[Order, Reply], node: Node, hosts: Mapping[int, str], say: Callable[[str], None]
) -> list[Finding]:
    replies = leader.ask(dict.fromkeys(range(node.layout.nnodes), Order(asks_inventory=True)))
    inventories = {rank: reply.inventory for rank, reply in replies.items() if reply.inventory}
    found = [*rdma_bandwidth.absent(inventories, hosts), *rdma_bandwidth.uneven(inventories, hosts)]
    ready = {rank: one for rank, one in inventories.items() if one.rails}
    if ready:
        tournament = Tournament(ready, lambda transfers: _transferred(leader, ready, transfers), say)
        found += rdma_bandwidth.findings(tournament.play(), ready, hosts, leader.lost)
    return found


def _transferred(
    leader: steps.Leader[Order, Reply], inventories: Mapping[int, Inventory], transfers: Sequence[Transfer]
) -> dict[Transfer, Reading]:
    """Run transfers at once: a step in which the receivers begin to serve, and one in which the senders send."""
    receivers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        receivers[transfer.receiver.node].append(transfer)
    served = leader.ask(
        {rank: Order(serves=tuple(one.receiver.rail for one in some)) for rank, some in receivers.items()}
    )
    found: dict[Transfer, Reading] = {}
    senders: dict[int, list[tuple[Transfer, Send]]] = defaultdict(list)
    for rank, some in receivers.items():
        servers = served[rank].servers if rank in served else ()
        for transfer, server in zip(some, servers, strict=False):
            if server.problem:
                found[transfer] = Reading(problem=server.problem)
                continue
            address = inventories[rank].address
            order = Send(rail=transfer.sender.rail, address=address, tcp_port=server.tcp_port)
            senders[transfer.sender.node].append((transfer, order))
    sent = leader.ask({rank: Order(sends=tuple(order for _, order in some)) for rank, some in senders.items()})
    for rank, asked in senders.items():
        readings = sent[rank].readings if rank in sent else ()
        found |= {transfer: reading for (transfer, _), reading in zip(asked, readings, strict=False)}
    return found


def follow(node: Node, host: str, *, is_quick: bool = False) -> None:
    """Another node: does what node 0 orders."""
    seconds = QUICK_SECONDS if is_quick else SECONDS
    performer = Performer(node, seconds)
    try:
        steps.follow(node.layout, host, performer.perform, Order, _limit_s(seconds) + LISTEN_LIMIT_S, ARRIVAL_LIMIT_S)
    finally:
        performer.close()


def _limit_s(seconds: int) -> float:
    """Of one step; a node that is late by more is lost."""
    return seconds + 2 * SLACK_S + LISTEN_LIMIT_S

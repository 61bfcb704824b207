"""Measure RDMA bandwidth between the nodes of a preflight: node 0 coordinates, and every node runs perftest."""

from __future__ import annotations

import shutil
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from primus.machine.network.selection import find_roce_v2_index
from primus.preflight.checks.ports import list_counted_ports
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode
from primus.preflight.nodes import steps
from primus.preflight.rdma import bandwidth as rdma_bandwidth
from primus.preflight.rdma.bandwidth import RdmaInventory, Tournament, Transfer
from primus.preflight.rdma.perftest import LISTEN_LIMIT_S, PROGRAM, PerftestServer, Rail, TransferReading, send_data

SECONDS, QUICK_SECONDS = 5, 1
"""Duration of one transfer."""
SLACK_S = 20.0
"""Time for the set-up of perftest and for the connection between nodes."""

ARRIVAL_LIMIT_S = 300.0
"""The nodes first finish their own measurements, of which slow folders take longest."""


class SendRequest(Struct, frozen=True, kw_only=True):
    """A transfer, as the sender receives it."""

    rail: int
    address: str
    tcp_port: int


class RdmaRequest(Struct, frozen=True, kw_only=True):
    """Request to one node for one step: report its inventory, start servers on some rails, or send."""

    asks_inventory: bool = False
    serves: tuple[int, ...] = ()
    """Rails, possibly repeated. All servers of earlier steps are stopped."""
    sends: tuple[SendRequest, ...] = ()


class ServerPort(Struct, frozen=True, kw_only=True):
    """A waiting server, or why it could not be started."""

    tcp_port: int
    problem: str = ""


class RdmaReply(Struct, frozen=True, kw_only=True):
    """Results of a request, in the order of its entries."""

    inventory: RdmaInventory | None = None
    servers: tuple[ServerPort, ...] = ()
    readings: tuple[TransferReading, ...] = ()


class RdmaWorker:
    """Servers and clients of one node. `close` stops the remaining ones."""

    def __init__(self, node: PreflightNode, seconds: int) -> None:
        self._node, self._seconds = node, seconds
        self._rails = list_rails(node)
        self._servers: list[PerftestServer] = []

    def handle_request(self, order: RdmaRequest) -> RdmaReply:
        # One node handles one request at a time. Servers live from their `serves` request to the next one or `close`,
        # so that the `sends` request of the following step finds them listening.
        if order.asks_inventory:
            return RdmaReply(inventory=self._build_inventory())
        if order.serves:
            self.close()
            self._servers = [
                PerftestServer(
                    self._rails[rail], self._seconds, self._node.environ, reserved=(self._node.layout.master_port,)
                )
                for rail in order.serves
            ]
            return RdmaReply(
                servers=tuple(ServerPort(tcp_port=one.tcp_port, problem=one.problem) for one in self._servers)
            )
        # One thread for each client: the transfers of a step must overlap, or ports that share a path would look
        # healthy.
        with ThreadPoolExecutor(max(1, len(order.sends))) as pool:
            return RdmaReply(readings=tuple(pool.map(self._send_data, order.sends)))

    def close(self) -> None:
        for server in self._servers:
            server.stop()
        self._servers = []

    def _send_data(self, one: SendRequest) -> TransferReading:
        limit_s = self._seconds + SLACK_S
        return send_data(self._rails[one.rail], one.address, one.tcp_port, self._seconds, self._node.environ, limit_s)

    def _build_inventory(self) -> RdmaInventory:
        if not self._rails:
            return RdmaInventory(problem="no active RDMA port")
        if shutil.which(PROGRAM, path=self._node.environ.get("PATH")) is None:
            return RdmaInventory(problem=f"{PROGRAM} is not installed")
        return RdmaInventory(address=_find_own_address(self._node), rails=self._rails)


def list_rails(node: PreflightNode) -> tuple[Rail, ...]:
    """The active ports in use, in their order."""
    active = [(device, port) for device, port in list_counted_ports(node)[0] if port.is_active]
    return tuple(
        Rail(
            index=index,
            hca=device.name,
            port=port.number,
            rate_gbps=port.rate_gbps,
            gid_index=find_roce_v2_index(port) if port.link_layer == "Ethernet" else None,
        )
        for index, (device, port) in enumerate(active)
    )


def _find_own_address(node: PreflightNode) -> str:
    """The address of this node on the route to the master, by which the other nodes reach it."""
    layout = node.layout
    if layout.nnodes == 1:
        return "localhost"
    if layout.node_rank == 0:
        return layout.master_addr
    try:
        ways = socket.getaddrinfo(layout.master_addr, layout.master_port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = min(ways, key=lambda way: way[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # on a datagram socket: selects the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def lead_measurements(
    node: PreflightNode, host: str, hosts: Mapping[int, str], say: Callable[[str], None], *, is_quick: bool = False
) -> list[CheckFinding]:
    """Node 0: run the measurements and return the findings of all nodes."""
    seconds = QUICK_SECONDS if is_quick else SECONDS
    performer = RdmaWorker(node, seconds)
    try:
        with steps.StepLeader(
            node.layout, host, performer.handle_request, RdmaReply, _compute_limit_s(seconds), ARRIVAL_LIMIT_S
        ) as leader:
            return _measure_bandwidth(leader, node, hosts, say)
    finally:
        performer.close()


def _measure_bandwidth(
    leader: steps.StepLeader[RdmaRequest, RdmaReply],
    node: PreflightNode,
    hosts: Mapping[int, str],
    say: Callable[[str], None],
) -> list[CheckFinding]:
    replies = leader.request_step(dict.fromkeys(range(node.layout.nnodes), RdmaRequest(asks_inventory=True)))
    inventories = {rank: reply.inventory for rank, reply in replies.items() if reply.inventory}
    found = [
        *rdma_bandwidth.report_absent_nodes(inventories, hosts),
        *rdma_bandwidth.report_uneven_nodes(inventories, hosts),
    ]
    ready = {rank: one for rank, one in inventories.items() if one.rails}
    if ready:
        tournament = Tournament(ready, lambda transfers: _run_transfers(leader, ready, transfers), say)
        found += rdma_bandwidth.report_tournament(tournament.run_tournament(), ready, hosts, leader.lost)
    return found


def _run_transfers(
    leader: steps.StepLeader[RdmaRequest, RdmaReply],
    inventories: Mapping[int, RdmaInventory],
    transfers: Sequence[Transfer],
) -> dict[Transfer, TransferReading]:
    """Run transfers concurrently in two steps: the receivers start their servers, then the senders send."""
    receivers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        receivers[transfer.receiver.node].append(transfer)
    # All servers listen before any client starts: the replies of this step are a barrier.
    served = leader.request_step(
        {rank: RdmaRequest(serves=tuple(one.receiver.rail for one in some)) for rank, some in receivers.items()}
    )
    found: dict[Transfer, TransferReading] = {}
    senders: dict[int, list[tuple[Transfer, SendRequest]]] = defaultdict(list)
    for rank, some in receivers.items():
        # A receiver that did not reply has no servers: its transfers stay without a reading, which counts as 0.
        servers = served[rank].servers if rank in served else ()
        for transfer, server in zip(some, servers, strict=False):
            if server.problem:
                found[transfer] = TransferReading(problem=server.problem)
                continue
            address = inventories[rank].address
            order = SendRequest(rail=transfer.sender.rail, address=address, tcp_port=server.tcp_port)
            senders[transfer.sender.node].append((transfer, order))
    sent = leader.request_step(
        {rank: RdmaRequest(sends=tuple(order for _, order in some)) for rank, some in senders.items()}
    )
    for rank, asked in senders.items():
        readings = sent[rank].readings if rank in sent else ()
        found |= {transfer: reading for (transfer, _), reading in zip(asked, readings, strict=False)}
    return found


def follow_measurements(node: PreflightNode, host: str, *, is_quick: bool = False) -> None:
    """Another node: handle the requests of node 0 until it ends the session."""
    seconds = QUICK_SECONDS if is_quick else SECONDS
    performer = RdmaWorker(node, seconds)
    try:
        # Longer than node 0's limit for a step: node 0 starts to collect replies only after its own part, which
        # includes the start of its servers.
        steps.follow_steps(
            node.layout,
            host,
            performer.handle_request,
            RdmaRequest,
            _compute_limit_s(seconds) + LISTEN_LIMIT_S,
            ARRIVAL_LIMIT_S,
        )
    finally:
        performer.close()


def _compute_limit_s(seconds: int) -> float:
    """Limit of one step; a node that exceeds it is lost."""
    # Servers start within LISTEN_LIMIT_S, a client runs for `seconds` and its slack; the second slack is for the
    # exchange.
    return seconds + 2 * SLACK_S + LISTEN_LIMIT_S

"""Node 0 collects one report of each node over TCP, and answers all of them once it has decided.

    node k                                          node 0
                                                <-  greeting
    NodeArrival: rank, host, port, clock        ->
                                                <-  peers, once all nodes have arrived or are late
    connects to each peer
    ReportDelivery: report, unreachable peers   ->
                                                <-  answer, once node 0 has decided

A node that is late, dies or never connects costs no more than the time limit.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
from msgspec import Struct

from primus.launch.nodes.message_stream import (
    CONNECT_LIMIT_S,
    Deadline,
    MessageStream,
    accept_stream,
    converse_with_head,
    open_listener,
)

GREETING = "primus preflight"
"""Node 0's first message: while workers run, torchelastic's rendezvous listens on the same port."""
GREETING_LIMIT_S = 3.0
"""Time for the greeting, which node 0 sends at once; a program that waits for the other side to speak never does."""
ACCEPT_S = 0.1
"""Time between two looks at who has arrived: connections are admitted by threads."""


class NodeArrival(Struct, frozen=True, kw_only=True):
    """First message of a node."""

    node_rank: int
    host: str
    port: int = 0
    """Port on which the node listens for the others."""
    time: float
    """Its clock, in seconds since the epoch."""


class Peer(Struct, frozen=True, kw_only=True):
    """A node, and its address for the others."""

    node_rank: int
    host: str
    address: str
    port: int


class ReportDelivery(Struct, frozen=True, kw_only=True):
    """A node's report, and the peers that it could not reach."""

    report: msgspec.Raw
    unreached: tuple[int, ...] = ()
    """Node ranks."""


class CollectedReport(Struct, frozen=True, kw_only=True):
    """What node 0 received from one node."""

    node_rank: int
    host: str
    report: bytes | None = None
    """JSON; None if the node arrived and then timed out."""
    unreached: tuple[int, ...] = ()
    offset_s: float = 0.0
    """Its clock minus that of node 0, when it arrived."""


def find_unreachable_peers(peers: tuple[Peer, ...], own_rank: int) -> tuple[int, ...]:
    """Ranks of the peers to which no connection could be made, each tried for `CONNECT_LIMIT_S`, all at once."""
    failed: list[int] = []

    def attempt(peer: Peer) -> None:
        try:
            socket.create_connection((peer.address, peer.port), timeout=CONNECT_LIMIT_S).close()
        except OSError:
            failed.append(peer.node_rank)

    # All at once: one after the other, unreachable peers of a large job would use up the limit.
    threads = [
        threading.Thread(target=attempt, args=(peer,), daemon=True) for peer in peers if peer.node_rank != own_rank
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CONNECT_LIMIT_S + 1)
    return tuple(sorted(failed))


@contextmanager
def open_probe_port() -> Iterator[int]:
    """A port to which the other nodes may connect, to see that they can; gives its number."""
    with closing(open_listener(0)) as server:
        yield int(server.getsockname()[1])


def deliver_report(address: str, port: int, arrival: NodeArrival, report: bytes, timeout_s: float) -> bytes | None:
    """Another node: arrive, probe the peers, deliver `report`; gives node 0's answer, None if it sent none.

    Raises:
        PrimusError: Node 0 was not reached in time.
    """
    deadline = Deadline(timeout_s)
    with open_probe_port() as own_port:
        stream = connect_to_head(address, port, timeout_s)
        with closing(stream), contextlib.suppress(OSError):
            stream.send(msgspec.structs.replace(arrival, port=own_port), deadline.remaining_s)
            peers = stream.receive(tuple[Peer, ...], deadline)
            if peers is None:
                return None
            # Node 0 does not know the address by which others reach it; here it is the one that just worked.
            known = tuple(msgspec.structs.replace(peer, address=peer.address or address) for peer in peers)
            unreached = find_unreachable_peers(known, arrival.node_rank)
            delivery = ReportDelivery(report=msgspec.Raw(report), unreached=unreached)
            stream.send(delivery, deadline.remaining_s)
            answer = stream.receive(msgspec.Raw, deadline)
            return bytes(answer) if answer is not None else None
    return None


def connect_to_head(address: str, port: int, timeout_s: float) -> MessageStream:
    """A connection to node 0, which has sent its greeting.

    Raises:
        PrimusError: Node 0 was not reached in time.
    """

    def receive_greeting(stream: MessageStream, deadline: Deadline) -> bool | None:
        limit = Deadline(min(GREETING_LIMIT_S, deadline.remaining_s))
        return True if stream.receive(str, limit) == GREETING else None

    return converse_with_head(address, port, timeout_s, receive_greeting)[0]


class ReportCollector:
    """Node 0: collect the reports of the other nodes, then answer them.

    Threads admit and hear the nodes, one thread each; `_lock` guards `_nodes` while nodes arrive.

    Args:
        port: Where node 0 listens.
        nnodes: Number of nodes, node 0 included.
        timeout_s: Limit of everything up to the answer.

    Raises:
        PrimusError: The port is in use.
    """

    def __init__(self, port: int, nnodes: int, timeout_s: float) -> None:
        self._server = open_listener(port)
        self._nnodes = nnodes
        self._deadline = Deadline(timeout_s)
        # A node that never arrives must leave the others time to probe each other, twice the limit of a connection.
        self._arrival_deadline = Deadline(timeout_s - min(2 * CONNECT_LIMIT_S, timeout_s / 4))
        self._lock = threading.Lock()
        self._nodes: dict[int, _ReportingNode] = {}
        self.unreached: tuple[int, ...] = ()
        """Ranks that node 0 could not reach."""

    def __enter__(self) -> ReportCollector:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes.values():
            node.stream.close()
        self._server.close()

    def collect_reports(self, own_host: str) -> list[CollectedReport]:
        """The reports of the other nodes by rank; nodes that did not arrive are missing."""
        self._accept_connections()
        with open_probe_port() as own_port:
            own = Peer(node_rank=0, host=own_host, address="", port=own_port)
            nodes = [node for _, node in sorted(self._nodes.items())]
            peers = (own, *(node.peer for node in nodes))
            # Nodes probe each other while node 0 probes them: the probe ports of all are open until the last report.
            threads = [_start_thread(node.exchange_messages, peers, self._deadline) for node in nodes]
            self.unreached = find_unreachable_peers(peers, 0)
            for thread in threads:
                thread.join(self._deadline.remaining_s)
        return [node.make_collected_report() for node in nodes]

    def send_answer(self, text: bytes) -> None:
        """Send every node that has arrived the same JSON value."""
        for node in self._nodes.values():
            with contextlib.suppress(OSError):  # a node that has exited needs no answer
                node.stream.send(msgspec.Raw(text), CONNECT_LIMIT_S)

    def _accept_connections(self) -> None:
        """Accept connections until every node has arrived, or is late."""
        while len(self._nodes) < self._nnodes - 1 and not self._arrival_deadline.is_over:
            accepted = accept_stream(self._server, Deadline(ACCEPT_S))
            if accepted is not None:
                # A connection that stays silent must not delay the nodes behind it.
                _start_thread(self._admit_connection, *accepted)

    def _admit_connection(self, stream: MessageStream, address: str) -> None:
        """Keep a connection that names a node which is expected and has not arrived yet."""
        arrival = None
        with contextlib.suppress(OSError):
            stream.send(GREETING, self._arrival_deadline.remaining_s)
            arrival = stream.receive(NodeArrival, self._arrival_deadline)
        with self._lock:
            if arrival is not None and self._is_expected(arrival.node_rank):
                self._nodes[arrival.node_rank] = _ReportingNode(stream, address, arrival)
                return
        stream.close()

    def _is_expected(self, rank: int) -> bool:
        return 0 < rank < self._nnodes and rank not in self._nodes and not self._arrival_deadline.is_over


class _ReportingNode:
    """A node that has arrived, as node 0 sees it."""

    def __init__(self, stream: MessageStream, address: str, arrival: NodeArrival) -> None:
        self.stream = stream
        self.peer = Peer(node_rank=arrival.node_rank, host=arrival.host, address=address, port=arrival.port)
        self._delivery: ReportDelivery | None = None
        self._offset_s = arrival.time - time.time()  # includes the time of the message, milliseconds

    def exchange_messages(self, peers: tuple[Peer, ...], deadline: Deadline) -> None:
        with contextlib.suppress(OSError):  # its missing report shows that the node has exited
            self.stream.send(peers, deadline.remaining_s)
            self._delivery = self.stream.receive(ReportDelivery, deadline)

    def make_collected_report(self) -> CollectedReport:
        delivery = self._delivery
        return CollectedReport(
            node_rank=self.peer.node_rank,
            host=self.peer.host,
            report=bytes(delivery.report) if delivery else None,
            unreached=delivery.unreached if delivery else (),
            offset_s=self._offset_s,
        )


def _start_thread(call: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread

"""Node 0 collects one message of every node over TCP, and answers all of them once it has decided.

A node says who it is and where it listens; node 0 tells every node that has come who the others are, and each tries to
reach all of them; each sends its report, and node 0 answers. A node that is late, dies or never comes costs no more
than the time limit.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import msgspec
from msgspec import Struct

from primus.errors import PrimusError

RETRY_S = 0.2
CONNECT_LIMIT_S = 5.0
GREETING = b"primus preflight\n"
"""Node 0's first word: while workers run, their rendezvous listens on the same port."""
GREETING_LIMIT_S = 3.0
MAX_BYTES = 64 << 20
"""More than any report has."""
Message = TypeVar("Message")


class NodeArrival(Struct, frozen=True, kw_only=True):
    """What a node says first."""

    node_rank: int
    host: str
    port: int = 0
    """Where the node listens for the others."""
    time: float
    """Its clock, in seconds since the epoch."""


class Peer(Struct, frozen=True, kw_only=True):
    """A node as the others may reach it."""

    node_rank: int
    host: str
    address: str
    port: int


class ReportDelivery(Struct, frozen=True, kw_only=True):
    """A node's report, and whom it could not reach."""

    report: msgspec.Raw
    unreached: tuple[int, ...] = ()
    """Node ranks."""


class CollectedReport(Struct, frozen=True, kw_only=True):
    """What came of one node."""

    node_rank: int
    host: str
    report: bytes | None = None
    """JSON; None where the node came and then fell silent."""
    unreached: tuple[int, ...] = ()
    offset_s: float = 0.0
    """Its clock minus that of node 0, when it came."""


def find_unreachable_peers(peers: tuple[Peer, ...], own_rank: int) -> tuple[int, ...]:
    """Ranks of the peers to which no connection could be made, each tried for `CONNECT_LIMIT_S`, all at once."""
    failed: list[int] = []

    def attempt(peer: Peer) -> None:
        try:
            socket.create_connection((peer.address, peer.port), timeout=CONNECT_LIMIT_S).close()
        except OSError:
            failed.append(peer.node_rank)

    threads = [
        threading.Thread(target=attempt, args=(peer,), daemon=True) for peer in peers if peer.node_rank != own_rank
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CONNECT_LIMIT_S + 1)
    return tuple(sorted(failed))


@contextmanager
def open_listener() -> Iterator[int]:
    """A port where the other nodes may connect to see that they can; gives its number."""
    with closing(socket.create_server(("", 0), backlog=1024)) as server:
        yield int(server.getsockname()[1])


def deliver_report(address: str, port: int, arrival: NodeArrival, report: bytes, timeout_s: float) -> bytes | None:
    """Another node: come, look for the others, deliver `report`; gives node 0's answer, None where it gave none.

    Raises:
        PrimusError: Node 0 was not reached in time.
    """
    deadline = time.monotonic() + timeout_s
    with open_listener() as own_port, _connect_to_head(address, port, deadline) as connection:
        try:
            reader = connection.makefile("rb")
            _write_message(connection, msgspec.structs.replace(arrival, port=own_port))
            connection.settimeout(_remaining_s(deadline))
            peers = _decode_message(reader.readline(MAX_BYTES), tuple[Peer, ...])
            if peers is None:
                return None
            known = tuple(msgspec.structs.replace(peer, address=peer.address or address) for peer in peers)
            unreached = find_unreachable_peers(known, arrival.node_rank)
            _write_message(connection, ReportDelivery(report=msgspec.Raw(report), unreached=unreached))
            connection.settimeout(_remaining_s(deadline))
            return reader.readline(MAX_BYTES).rstrip(b"\n") or None
        except OSError:
            return None


def _connect_to_head(address: str, port: int, deadline: float) -> socket.socket:
    """A connection to node 0, which has greeted."""
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=min(10.0, _remaining_s(deadline)))
            if _sends_greeting(connection, min(GREETING_LIMIT_S, _remaining_s(deadline))):
                return connection
            connection.close()
            problem = "another program listens there"
        except OSError as error:
            problem = str(error)
        if time.monotonic() + RETRY_S > deadline:
            raise PrimusError(
                f"node 0 at {address}:{port} was not reached in time: {problem}", "is it started, and the port open?"
            )
        time.sleep(RETRY_S)


def _sends_greeting(connection: socket.socket, limit_s: float) -> bool:
    connection.settimeout(limit_s)
    with contextlib.suppress(OSError):
        return connection.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
    return False


class ReportCollector:
    """Node 0's side: gather what the others say, then answer them.

    Args:
        port: Where node 0 listens.
        nnodes: Number of nodes, node 0 included.
        timeout_s: Limit of everything up to the answer.

    Raises:
        PrimusError: The port is in use.
    """

    def __init__(self, port: int, nnodes: int, timeout_s: float) -> None:
        try:
            self._server = socket.create_server(("", port), backlog=1024)
        except OSError as error:
            raise PrimusError(
                f"port {port} cannot be used: {error.strerror}", "choose another --master-port, the same on every node"
            ) from None
        self._nnodes = nnodes
        self._deadline = time.monotonic() + timeout_s
        self._arrived_by = self._deadline - min(2 * CONNECT_LIMIT_S, timeout_s / 4)
        self._lock = threading.Lock()
        self._guests: dict[int, _ReportingNode] = {}
        self.unreached: tuple[int, ...] = ()
        """Ranks that node 0 could not reach."""

    def __enter__(self) -> ReportCollector:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in self._guests.values():
            guest.close()
        self._server.close()

    def collect_reports(self, own_host: str) -> list[CollectedReport]:
        """What came of each other node, by rank; nodes that never came are not among them."""
        self._accept_connections()
        with open_listener() as own_port:
            own = Peer(node_rank=0, host=own_host, address="", port=own_port)
            guests = [guest for _, guest in sorted(self._guests.items())]
            peers = (own, *(guest.as_peer for guest in guests))
            threads = [_start_thread(guest.exchange_messages, peers, self._deadline) for guest in guests]
            self.unreached = find_unreachable_peers(peers, 0)
            for thread in threads:
                thread.join(_remaining_s(self._deadline))
        return [guest.collected_report() for guest in guests]

    def send_answer(self, text: bytes) -> None:
        """Tell every node that has come the same line."""
        for guest in self._guests.values():
            guest.send_answer(text)

    def _accept_connections(self) -> None:
        """Take connections until every node has come, or it is late."""
        while len(self._guests) < self._nnodes - 1 and time.monotonic() < self._arrived_by:
            self._server.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                connection, address = self._server.accept()
                _start_thread(self._admit_connection, connection, str(address[0]))

    def _admit_connection(self, connection: socket.socket, address: str) -> None:
        """Keep a connection that names a node which is expected and has not come yet."""
        guest = _ReportingNode(connection, address, _remaining_s(self._arrived_by))
        with self._lock:
            if guest.arrival and 0 < guest.arrival.node_rank < self._nnodes:
                rank = guest.arrival.node_rank
                if rank not in self._guests and time.monotonic() < self._arrived_by:
                    self._guests[rank] = guest
                    return
        guest.close()


class _ReportingNode:
    """A node that has come."""

    def __init__(self, connection: socket.socket, address: str, limit_s: float) -> None:
        self._connection = connection
        self._address = address
        self._reader = connection.makefile("rb")
        self._delivery: ReportDelivery | None = None
        connection.settimeout(limit_s)
        try:
            connection.sendall(GREETING)
            self.arrival = _decode_message(self._reader.readline(4096), NodeArrival)
        except OSError:
            self.arrival = None
        self._offset_s = self.arrival.time - time.time() if self.arrival else 0.0

    @property
    def as_peer(self) -> Peer:
        assert self.arrival
        return Peer(
            node_rank=self.arrival.node_rank, host=self.arrival.host, address=self._address, port=self.arrival.port
        )

    def exchange_messages(self, peers: tuple[Peer, ...], deadline: float) -> None:
        with contextlib.suppress(OSError):  # who falls silent is told by what is missing
            self._connection.settimeout(_remaining_s(deadline))
            _write_message(self._connection, peers)
            self._delivery = _decode_message(self._reader.readline(MAX_BYTES), ReportDelivery)

    def collected_report(self) -> CollectedReport:
        assert self.arrival
        came = self._delivery
        return CollectedReport(
            node_rank=self.arrival.node_rank,
            host=self.arrival.host,
            report=bytes(came.report) if came else None,
            unreached=came.unreached if came else (),
            offset_s=self._offset_s,
        )

    def send_answer(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # who has gone needs none
            self._connection.settimeout(CONNECT_LIMIT_S)
            self._connection.sendall(text + b"\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # ends a reader that still waits
        self._connection.close()


def _start_thread(call: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def _write_message(connection: socket.socket, message: object) -> None:
    connection.sendall(msgspec.json.encode(message) + b"\n")


def _decode_message(line: bytes, kind: type[Message]) -> Message | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError:
        return None


def _remaining_s(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())

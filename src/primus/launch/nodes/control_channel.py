"""Connections between node 0 and each other node while a job runs: a node that fails is known at once.

The rendezvous opens the connections, the exit barrier closes them. In between a thread of each node sends "alive" every
second. A connection that ends means that the launcher there has died; silence for `HEARTBEAT_TIMEOUT_S`
means that its host or the network has.

A node is, as seen from this one:

    working      connected, and taking part in the attempt (`ranks`)
    lost         has failed; it may still be connected, to run its hooks (`connected_ranks`)
    disconnected its connection has ended or it timed out; it is also lost

A node only ever moves down this list.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from primus.launch.nodes.message_stream import Deadline, MessageStream

ALIVE_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 30.0
"""Silence after which a node counts as lost: longer than a stalled file system or a burst of packet loss lasts."""
SEND_LIMIT_S = 5.0
"""Time for a message to fit into the other side's buffers; the thread there reads all the time."""
SELECT_S = 0.1
"""Longest sleep of the thread, so that it sends "alive" and notices `close` in time."""
Body = TypeVar("Body")


class ControlMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message from one node to another.

    The channel itself handles `alive`, `lost` (this node fails, for the reason in `text`) and `finished` (its hooks are
    done), and reports `lost` to its user as well. All other kinds are those of its users.
    """

    kind: str
    text: str = ""
    number: int = 0
    body: Any = None
    """Any value that msgspec encodes; the receiver reads it by `read_body`."""

    def read_body(self, kind: type[Body]) -> Body | None:
        """The body as a `kind`; None if it is something else."""
        try:
            return msgspec.convert(self.body, kind)
        except msgspec.ValidationError:
            return None


class ControlChannel:
    """Connections to other nodes: from node 0 to all of them, from another node to node 0.

    Its thread receives; any thread may send, and one thread takes the messages.

    Args:
        streams: By node rank.
        hosts: Names of their hosts, as far as they are known.
    """

    def __init__(self, streams: Mapping[int, MessageStream], hosts: Mapping[int, str]) -> None:
        self.hosts = dict(hosts)
        self.lost: dict[int, str] = {}
        """Why a node is lost, by its rank."""
        self.died_at: float | None = None
        """When the first connection ended without a word (monotonic clock)."""
        self.finished: set[int] = set()
        """Nodes whose hooks are done."""
        self._disconnected: set[int] = set()
        self._streams = dict(streams)
        self._inbox: queue.SimpleQueue[tuple[int, ControlMessage]] = queue.SimpleQueue()
        self._received_at = dict.fromkeys(streams, time.monotonic())
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        for rank, stream in self._streams.items():
            self._selector.register(stream, selectors.EVENT_READ, rank)
        # A thread, because the main thread blocks for minutes in hooks, while other nodes must know that it is alive.
        self._thread = threading.Thread(target=self._receive_loop, name="control-channel", daemon=True)
        if self._streams:
            self._thread.start()

    @property
    def ranks(self) -> frozenset[int]:
        """Nodes that take part in the work."""
        return frozenset(self._streams) - frozenset(self.lost)

    @property
    def connected_ranks(self) -> frozenset[int]:
        """Nodes that are connected, including those that have failed and still run their hooks."""
        return frozenset(self._streams) - self._disconnected

    def send_message(self, message: ControlMessage, to: Iterable[int] | None = None) -> None:
        """Send to all working nodes, or to those of `to` that are connected; a node that cannot be reached is lost."""
        for rank in self.ranks if to is None else set(to) & self.connected_ranks:
            # The thread and the main thread send; a stream keeps their messages apart.
            try:
                self._streams[rank].send(message, SEND_LIMIT_S)
            except OSError as error:
                self._disconnect(rank, f"sending to it failed: {error.strerror or error}")

    def receive_messages(self, timeout_s: float = 0.0) -> list[tuple[int, ControlMessage]]:
        """Messages that have arrived, by node rank; waits for the first at most `timeout_s`."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def close(self, patience_s: float = 0.0) -> None:
        """Close the connections; with patience once the other sides have, so that they have read everything."""
        # Closing with unread data resets the connection, and the other side loses what it has not read yet.
        deadline = Deadline(patience_s)
        while self.connected_ranks and not deadline.is_over:
            time.sleep(0.01)
        self._closed.set()  # the thread may be in `select`: it sees this after SELECT_S at most
        if self._thread.is_alive():
            self._thread.join(SEND_LIMIT_S)
        for stream in self._streams.values():
            stream.close()
        self._selector.close()

    def _receive_loop(self) -> None:
        """The thread: send "alive", receive, and time out nodes that are silent."""
        alive = ControlMessage(kind="alive")
        sent_at = 0.0
        for rank, stream in self._streams.items():  # received together with the last message of the rendezvous
            self._handle_messages(rank, stream.take_buffered(ControlMessage))
        while not self._closed.is_set():
            now = time.monotonic()
            if now - sent_at > ALIVE_INTERVAL_S:
                self.send_message(alive, self.connected_ranks)
                sent_at = now
            for key, _ in self._selector.select(timeout=SELECT_S):
                self._handle_messages(key.data, self._streams[key.data].receive_available(ControlMessage))
            # Not only the end of a connection: a host that loses power or network never closes any.
            for rank in self.connected_ranks:
                if now - self._received_at[rank] > HEARTBEAT_TIMEOUT_S:
                    self._disconnect(rank, f"no message for {HEARTBEAT_TIMEOUT_S:.0f} s")

    def _handle_messages(self, rank: int, messages: list[ControlMessage] | None) -> None:
        if messages is None:
            self._disconnect(rank, "its launcher has died")
            return
        self._received_at[rank] = time.monotonic()  # any bytes show that the node lives
        for message in messages:
            # A lost node stays connected: it runs its hooks, and the exit barrier waits for it.
            if message.kind == "lost":
                self._mark_lost(rank, message.text)
            elif message.kind == "finished":
                self.finished.add(rank)
            elif message.kind != "alive":
                self._inbox.put((rank, message))

    def _disconnect(self, rank: int, reason: str) -> None:
        """A node is not there any more; a reason that it sent before remains."""
        if rank in self._disconnected:
            return
        self.died_at = self.died_at or time.monotonic()
        self._disconnected.add(rank)  # first, so that two threads do not report it twice
        with contextlib.suppress(KeyError, ValueError):  # closed by another thread in the meantime
            self._selector.unregister(self._streams[rank])
        self._mark_lost(rank, reason)

    def _mark_lost(self, rank: int, reason: str) -> None:
        if rank not in self.lost:
            self.lost[rank] = reason
            self._inbox.put((rank, ControlMessage(kind="lost", text=reason)))

"""The connections between node 0 and the others while an attempt runs: who has gone is known at once.

Every node says each second that it is there. A connection that ends tells of a launcher that has died, one that falls
silent of a node that has.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from primus.launch.supervision.attempt_result import NodeResult
from primus.launch.supervision.hang_detector import ComputeTimeSample, RankStatus
from primus.launch.supervision.restart_policy import RestartDecision
from primus.runs.store import RankFailure, RunOutcome

ALIVE_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 30.0
"""Time without a word after which a node counts as lost; one whose launcher dies is known to be at once."""
SEND_LIMIT_S = 5.0
PART_BYTES = 2**16
ControlMessageKind = Literal[
    "alive",
    "lost",
    "failed",
    "signal",
    "hang",
    "look",
    "seen",
    "times",
    "end",
    "ended",
    "decision",
    "again",
    "finished",
    "leave",
]


class ControlMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What nodes tell each other."""

    kind: ControlMessageKind
    text: str = ""
    """Why a node was lost, or its ranks are to be ended."""
    number: int = 0
    """A signal, the next attempt, or the step after which a rank hangs."""
    failure: RankFailure | None = None
    standings: tuple[RankStatus, ...] = ()
    samples: tuple[ComputeTimeSample, ...] = ()
    ended: NodeResult | None = None
    decision: RestartDecision | None = None
    outcome: RunOutcome | None = None


class ControlChannel:
    """Connections to other nodes; of node 0 to all of them, of another one to node 0.

    Args:
        connections: By node rank.
        hosts: Names of their hosts, as far as they are known.
    """

    def __init__(self, connections: Mapping[int, socket.socket], hosts: Mapping[int, str]) -> None:
        self.hosts = dict(hosts)
        self.lost: dict[int, str] = {}
        """Why a node that is lost is so, by its rank; one that says so itself is still connected."""
        self.finished: set[int] = set()
        """Nodes that have done all they had to do."""
        self._gone: set[int] = set()
        """Nodes whose connection has ended, or that are silent."""
        self._connections = dict(connections)
        self._inbox: queue.SimpleQueue[tuple[int, ControlMessage]] = queue.SimpleQueue()
        self._halves = dict.fromkeys(connections, b"")
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        for rank, connection in self._connections.items():
            connection.settimeout(SEND_LIMIT_S)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._receive_loop, name="bond", daemon=True)
        if self._connections:
            self._thread.start()

    @property
    def ranks(self) -> frozenset[int]:
        """Nodes that take part in the work."""
        return frozenset(self._connections) - frozenset(self.lost)

    @property
    def connected_ranks(self) -> frozenset[int]:
        """Nodes that are still there, though they may have given up the work."""
        return frozenset(self._connections) - self._gone

    def send_message(self, message: ControlMessage, to: Iterable[int] | None = None) -> None:
        """Tell all nodes, or some; one that cannot be told is lost."""
        line = msgspec.json.encode(message) + b"\n"
        for rank in self.ranks if to is None else set(to) & self.connected_ranks:
            try:
                with self._sending:
                    self._connections[rank].sendall(line)
            except OSError as error:
                self._mark_lost(rank, f"it cannot be told anything: {error.strerror or error}")

    def receive_messages(self, timeout_s: float = 0.0) -> list[tuple[int, ControlMessage]]:
        """What has come since, by node rank; waits for something at most `timeout_s`."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait())
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def close(self, patience_s: float = 0.0) -> None:
        """End the connections; with patience once the others have ended theirs, so that they have read everything."""
        deadline = time.monotonic() + patience_s
        while self.connected_ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(SEND_LIMIT_S)
        for connection in self._connections.values():
            connection.close()
        self._selector.close()

    def _receive_loop(self) -> None:
        alive = ControlMessage(kind="alive")
        said = 0.0
        while not self._closed.is_set():
            now = time.monotonic()
            if now - said > ALIVE_INTERVAL_S:
                self.send_message(alive, self.connected_ranks)
                said = now
            for key, _ in self._selector.select(timeout=0.1):
                self._read_connection(key.data)
            for rank in self.connected_ranks:
                if now - self._heard[rank] > HEARTBEAT_TIMEOUT_S:
                    self._mark_lost(rank, f"it has said nothing for {HEARTBEAT_TIMEOUT_S:.0f} s")

    def _read_connection(self, rank: int) -> None:
        try:
            part = self._connections[rank].recv(PART_BYTES)
        except TimeoutError:
            return
        except OSError:
            part = b""
        if not part:
            self._mark_lost(rank, "its launcher has died")
            return
        self._heard[rank] = time.monotonic()
        *lines, self._halves[rank] = (self._halves[rank] + part).split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                message = msgspec.json.decode(line, type=ControlMessage)
                if message.kind == "lost":
                    self._note_lost(rank, message.text)
                elif message.kind == "finished":
                    self.finished.add(rank)
                elif message.kind != "alive":
                    self._inbox.put((rank, message))

    def _mark_lost(self, rank: int, reason: str) -> None:
        """A node is not there any more; where it said why before it went, that stays the reason."""
        if rank in self._gone:
            return
        self._gone.add(rank)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._connections[rank])
        self._note_lost(rank, reason)

    def _note_lost(self, rank: int, reason: str) -> None:
        if rank not in self.lost:
            self.lost[rank] = reason
            self._inbox.put((rank, ControlMessage(kind="lost", text=reason)))

"""Messages between the nodes of a job: JSON values over TCP, one a line, each with a time limit.

Framing, limits and retries of all conversations between nodes are here. Above it are the rendezvous, which hands its
connections to the control channel, the exit barrier at the end of the job, and the collection of reports by preflight.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from primus.errors import PrimusError

CONNECT_LIMIT_S = 5.0
"""Time for one attempt to connect. A host that drops packets must not use up the limit of the whole conversation."""
RETRY_S = 0.2
"""Pause between attempts to connect. Nodes are started one by one, so node 0 often listens some seconds later."""
PART_BYTES = 2**16
MAX_MESSAGE_BYTES = 64 << 20
"""Maximum length of a message, above the report of any node; a longer line is from another program."""
BACKLOG = 1024
"""Connections that wait to be accepted: nodes of a large job connect at once."""
Message = TypeVar("Message")


class Deadline:
    """End of a time limit that begins now."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def remaining_s(self) -> float:
        """Time left; a little more than zero at the end, since a socket with a limit of zero does not block."""
        return max(0.01, self._end - time.monotonic())


class MessageStream:
    """One side of a connection. One thread at a time may receive; several may send, and their messages do not mix."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        """Received, but not taken: it stays with the stream when another layer continues the conversation."""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, message: object, limit_s: float) -> None:
        """Send a value that msgspec encodes.

        Raises:
            OSError: The other side has closed the connection, or does not read within the limit.
        """
        # The time limit belongs to the socket, and a large message takes several writes: one sender at a time.
        with self._sending:
            self._connection.settimeout(limit_s)
            self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self, kind: type[Message], deadline: Deadline) -> Message | None:
        """The next message as a `kind`; None if the other side has closed, is late or sends something else."""
        searched = 0  # where to continue the search: a report of megabytes arrives in many parts
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if deadline.is_over or searched > MAX_MESSAGE_BYTES:
                return None
            # The limit of each part is what is left of the whole: a slow sender cannot extend it.
            try:
                self._connection.settimeout(deadline.remaining_s)
                part = self._connection.recv(PART_BYTES)
            except OSError:
                return None
            if not part:
                return None
            self._buffer += part
        return self._take_message(end, kind)

    def receive_available(self, kind: type[Message]) -> list[Message] | None:
        """Messages that have arrived, for a caller that selects on the stream; None at the end of the connection."""
        try:
            part = self._connection.recv(PART_BYTES)
        except TimeoutError:
            return []
        except OSError:
            return None
        self._buffer += part  # an incomplete line stays until its rest arrives
        return self.take_buffered(kind) if part else None

    def take_buffered(self, kind: type[Message]) -> list[Message]:
        """Complete messages that were received together with an earlier one; lines of another kind are skipped."""
        found = []
        while (end := self._buffer.find(b"\n")) >= 0:
            message = self._take_message(end, kind)
            if message is not None:
                found.append(message)
        return found

    def is_open(self) -> bool:
        """Whether the other side is still there, while it has nothing to send."""
        # A peek takes nothing from the stream: no bytes and no error means that the other side closed it.
        self._connection.setblocking(False)
        try:
            return self._connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self._connection.setblocking(True)

    def close(self) -> None:
        """End the connection; a thread that still receives gets None."""
        with contextlib.suppress(OSError):  # not connected any more
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _take_message(self, end: int, kind: type[Message]) -> Message | None:
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError:
            return None


def open_listener(port: int) -> socket.socket:
    """A socket that listens on `port` of all interfaces; on a free one if it is 0.

    Raises:
        PrimusError: Another program uses the port.
    """
    try:
        return socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = "choose another --master-port, the same on every node"
        raise PrimusError(f"port {port} cannot be used: {reason}", hint) from None


def accept_stream(listener: socket.socket, deadline: Deadline) -> tuple[MessageStream, str] | None:
    """The next connection and its address; None if none arrives in time."""
    listener.settimeout(deadline.remaining_s)
    try:
        connection, address = listener.accept()
    except OSError:
        return None
    return MessageStream(connection), str(address[0])


def converse_with_head(
    address: str, port: int, limit_s: float, converse: Callable[[MessageStream, Deadline], Message | None]
) -> tuple[MessageStream, Message]:
    """Connect to node 0 and converse, again until `converse` gives a value; the connection stays open.

    Args:
        address: Of node 0.
        port: Where node 0 listens.
        limit_s: Time for everything.
        converse: Gives None, or raises OSError, where another program listens or node 0 was restarted.

    Raises:
        PrimusError: Node 0 is not reached in time.
    """
    deadline = Deadline(limit_s)
    while True:
        try:
            limit = min(CONNECT_LIMIT_S, deadline.remaining_s)
            stream = MessageStream(socket.create_connection((address, port), timeout=limit))
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            # Something listens: another program, a node 0 that was killed meanwhile, or torchelastic of an earlier job.
            reason = "the program that listens there does not answer"
            with contextlib.suppress(OSError):
                found = converse(stream, deadline)
                if found is not None:
                    return stream, found
            stream.close()
        if deadline.is_over:
            hint = "start the same command on node 0, and open this port between the nodes"
            raise PrimusError(f"node 0 at {address}:{port} was not reached in {limit_s:g} s: {reason}", hint)
        time.sleep(min(RETRY_S, deadline.remaining_s))

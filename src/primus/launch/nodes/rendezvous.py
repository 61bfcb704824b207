"""Nodes that were started one by one agree on their run, before any worker starts.

Node 0 listens on the rendezvous port that torchrun uses afterwards. Once every node has come it tells each of them the
run's id; where one does not come, was started with another configuration or failed before it came, it tells them that,
and nothing starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TypeVar

import msgspec
from msgspec import Struct

from primus.errors import EXIT_FAILED, EXIT_USAGE, PrimusError, UsageError
from primus.launch.plan import Variable

RETRY_S = 0.2
ABORT_REPLY_S = 30.0
"""Time that node 0 stays, after a failure, to tell the nodes that have not come yet."""
MESSAGE_LIMIT_BYTES = 2**20
Message = TypeVar("Message")


class JoinRequest(Struct, frozen=True):
    """What a node says of itself."""

    node_rank: int
    fingerprint: str
    """Hash of what must be equal on all nodes."""
    failure: str = ""
    """Why this node cannot begin."""
    exit_code: int = EXIT_FAILED
    host: str = ""


class RendezvousPeer(Struct, frozen=True):
    """A node that has come."""

    connection: socket.socket
    host: str = ""


class JoinReply(Struct, frozen=True):
    """What node 0 answers."""

    run_id: str
    attempt: int
    refusal: str = ""
    """What is wrong with the node that asks."""
    failure: str = ""
    """Why nothing starts on any node."""
    exit_code: int = EXIT_USAGE
    env: dict[str, Variable] = {}
    """What was set once for all nodes."""
    extra: tuple[str, ...] = ()
    """Words that change the experiment on all nodes."""
    host: str = ""
    """Name of node 0's host."""


class NodeFailed(PrimusError):
    """Another node could not begin; ends this one with its exit code."""

    def __init__(self, problem: str, exit_code: int) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


def check_port_free(port: int) -> None:
    """Raises PrimusError where another program listens on `port` of this machine."""
    try:
        with closing(_open_listener(port)):
            return
    except OSError as error:
        raise _port_error(port, error) from None


def lead_rendezvous(
    port: int,
    nnodes: int,
    welcome: JoinReply,
    fingerprint: str,
    timeout_s: float,
    kept: dict[int, RendezvousPeer] | None = None,
) -> None:
    """Node 0: wait until all nodes have come, then tell each of them the run; where that fails, tell them why.

    Args:
        port: Where node 0 listens.
        nnodes: Number of nodes, node 0 included.
        welcome: What the others are told.
        fingerprint: Hash of what must be equal on all nodes.
        timeout_s: Limit for all of them to come.
        kept: Filled with the nodes, whose connections then stay open.

    Raises:
        PrimusError: The port is in use, a node did not come in time, failed, or has another configuration.
    """
    try:
        listener = _open_listener(port)
    except OSError as error:
        raise _port_error(port, error) from None
    waiting: dict[int, RendezvousPeer] = {}
    with closing(listener):
        try:
            _accept_peers(listener, nnodes, fingerprint, time.monotonic() + timeout_s, waiting, kept)
        except NodeFailed as error:
            _send_abort(listener, nnodes, error.problem, error.exit_code, waiting, kept)
            raise
        except PrimusError as error:
            _send_replies(waiting, JoinReply("", 0, error.problem), kept)
            raise
        _send_replies(waiting, welcome, kept)


def abort_rendezvous(
    port: int, nnodes: int, failure: str, exit_code: int, kept: dict[int, RendezvousPeer] | None = None
) -> None:
    """Node 0, which cannot begin: tell the other nodes why, as far as they come within a short time.

    Args:
        port: Where node 0 listens.
        nnodes: Number of nodes, node 0 included.
        failure: Why it cannot begin.
        exit_code: With which all nodes are to end.
        kept: Filled with the nodes, whose connections then stay open.
    """
    with contextlib.suppress(OSError), closing(_open_listener(port)) as listener:
        _send_abort(listener, nnodes, failure, exit_code, {}, kept)


def _send_abort(
    listener: socket.socket,
    nnodes: int,
    failure: str,
    exit_code: int,
    waiting: dict[int, RendezvousPeer],
    kept: dict[int, RendezvousPeer] | None,
) -> None:
    """Tell those that wait, and those that come within a short time, that nothing starts."""
    last_word = JoinReply("", 0, failure=failure, exit_code=exit_code)
    _send_replies(waiting, last_word, kept)
    told = set(waiting)
    deadline = time.monotonic() + ABORT_REPLY_S
    while len(told) < nnodes - 1 and time.monotonic() < deadline:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(10)
            hello = _receive_message(connection, JoinRequest)
            if hello is None:
                connection.close()
                continue
            told.add(hello.node_rank)
            _send_replies({hello.node_rank: RendezvousPeer(connection, hello.host)}, last_word, kept)


def _accept_peers(
    listener: socket.socket,
    nnodes: int,
    fingerprint: str,
    deadline: float,
    waiting: dict[int, RendezvousPeer],
    kept: dict[int, RendezvousPeer] | None,
) -> None:
    """Fill `waiting` with a connection of each other node; that of one which is refused goes to `kept`."""
    started = time.monotonic()
    while missing := [rank for rank in range(1, nnodes) if not _is_open(waiting.get(rank))]:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            port = listener.getsockname()[1]
            raise PrimusError(
                f"node {', '.join(map(str, missing))} of {nnodes} did not come within {deadline - started:.0f} s",
                f"start the same command there with --node-rank N, and let it reach port {port} of this node",
            ) from None
        connection.settimeout(10)
        hello = _receive_message(connection, JoinRequest)
        if hello is None:
            connection.close()
        elif hello.node_rank not in range(1, nnodes) or _is_open(waiting.get(hello.node_rank)):
            refusal = f"the nodes are 1 to {nnodes - 1}, each started once"
            _send_replies({hello.node_rank: RendezvousPeer(connection)}, JoinReply("", 0, refusal))
        elif hello.failure:
            waiting[hello.node_rank] = RendezvousPeer(connection, hello.host)
            raise NodeFailed(hello.failure, hello.exit_code)
        elif hello.fingerprint != fingerprint:
            answer = JoinReply("", 0, "its configuration differs from that of node 0")
            _send_replies({hello.node_rank: RendezvousPeer(connection, hello.host)}, answer, kept)
            raise UsageError(
                f"node {hello.node_rank} was started with another configuration than node 0",
                "use the same experiment file, overrides and number of processes on every node",
            )
        else:
            if hello.node_rank in waiting:
                _send_replies({hello.node_rank: waiting.pop(hello.node_rank)}, JoinReply("", 0, "it came again"))
            waiting[hello.node_rank] = RendezvousPeer(connection, hello.host)


def _send_replies(
    guests: Mapping[int, RendezvousPeer], welcome: JoinReply, kept: dict[int, RendezvousPeer] | None = None
) -> None:
    """Answer nodes by their rank; their connections go to `kept`, or end."""
    for rank, guest in guests.items():
        with contextlib.suppress(OSError):  # who has gone is found out soon enough
            guest.connection.sendall(msgspec.json.encode(welcome) + b"\n")
        if kept is None:
            guest.connection.close()
        else:
            kept[rank] = guest


def _is_open(guest: RendezvousPeer | None) -> bool:
    """Whether the other side is still there; it says nothing while it waits."""
    if guest is None:
        return False
    connection = guest.connection
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.setblocking(True)


def join_rendezvous(
    address: str,
    port: int,
    node_rank: int,
    fingerprint: str,
    timeout_s: float,
    kept: dict[int, RendezvousPeer] | None = None,
) -> JoinReply:
    """Another node: ask node 0 for the run, trying until it listens, and wait until all nodes have come.

    Args:
        address: Of node 0.
        port: Where node 0 listens.
        node_rank: Of this node.
        fingerprint: Hash of what must be equal on all nodes.
        timeout_s: Limit for all of them to come.
        kept: Filled with node 0, whose connection then stays open.

    Raises:
        PrimusError: Node 0 was not reached in time, or refuses this node.
        NodeFailed: A node could not begin.
    """
    hello = JoinRequest(node_rank, fingerprint, host=socket.gethostname())
    answer = _request_join(address, port, hello, timeout_s, kept)
    if answer.failure:
        raise NodeFailed(answer.failure, answer.exit_code)
    if answer.refusal:
        raise UsageError(
            f"node 0 refuses node {node_rank}: {answer.refusal}", "use the same files and options on every node"
        )
    return answer


def abort_join(
    address: str,
    port: int,
    node_rank: int,
    failure: str,
    exit_code: int,
    timeout_s: float,
    kept: dict[int, RendezvousPeer] | None = None,
) -> None:
    """Another node, which cannot begin: tell node 0, and through it all nodes; `kept` gets node 0, as in `join`.

    Raises:
        PrimusError: Node 0 was not reached in time.
    """
    _request_join(address, port, JoinRequest(node_rank, "", failure, exit_code), timeout_s, kept)


def _request_join(
    address: str, port: int, hello: JoinRequest, timeout_s: float, kept: dict[int, RendezvousPeer] | None = None
) -> JoinReply:
    """What node 0 answers, tried until it listens."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(socket.create_connection((address, port), timeout=10))
                connection.sendall(msgspec.json.encode(hello) + b"\n")
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                answer = _receive_message(connection, JoinReply)
                if kept is not None and answer is not None:
                    kept[0] = RendezvousPeer(connection, answer.host or address)
                    stack.pop_all()
        except OSError as error:
            answer, reason = None, str(error)
        else:
            reason = "it gave no answer"
        if answer is not None:
            return answer
        if time.monotonic() > deadline:
            raise PrimusError(
                f"node 0 at {address}:{port} was not reached in {timeout_s:.0f} s: {reason}", "is it started?"
            )
        time.sleep(RETRY_S)


def _open_listener(port: int) -> socket.socket:
    return socket.create_server(("", port), reuse_port=False)


def _port_error(port: int, error: OSError) -> PrimusError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return PrimusError(f"port {port} cannot be used: {reason}", "choose another --master-port, the same on every node")


def _receive_message(connection: socket.socket, kind: type[Message]) -> Message | None:
    """One JSON line as a `kind`; None where the other side sends something else or nothing."""
    data = b""
    while not data.endswith(b"\n") and len(data) < MESSAGE_LIMIT_BYTES:
        try:
            part = _up_to_line(connection) if kind is JoinReply else connection.recv(4096)
        except OSError:
            return None
        if not part:
            break
        data += part
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None


def _up_to_line(connection: socket.socket) -> bytes:
    """What has come, but nothing after the end of a line: that is for whoever has the connection next."""
    seen = connection.recv(4096, socket.MSG_PEEK)
    return connection.recv(seen.find(b"\n") + 1 or len(seen)) if seen else b""

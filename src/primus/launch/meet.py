"""Nodes that were started one by one agree on their run, before any worker starts.

Node 0 listens on the rendezvous port that torchrun uses afterwards, and tells every other node the run's id. A node
that was started with another configuration is refused there and then.
"""

from __future__ import annotations

import socket
import time
from contextlib import closing

import msgspec
from msgspec import Struct

from primus.errors import PrimusError, UsageError

RETRY_S = 0.2


class Hello(Struct, frozen=True):
    """What a node says of itself."""

    node_rank: int
    fingerprint: str
    """Hash of what must be equal on all nodes."""


class Welcome(Struct, frozen=True):
    """What node 0 answers."""

    run_id: str
    attempt: int
    refusal: str = ""


def check_port_free(port: int) -> None:
    """Raises PrimusError where another program listens on `port` of this machine."""
    try:
        with closing(_listener(port)):
            return
    except OSError as error:
        raise _port_error(port, error) from None


def lead(port: int, nnodes: int, welcome: Welcome, fingerprint: str, timeout_s: float) -> None:
    """Node 0: wait for the other nodes and tell each of them the run.

    Raises:
        PrimusError: The port is in use, a node did not come in time, or one has another configuration.
    """
    deadline = time.monotonic() + timeout_s
    missing = set(range(1, nnodes))
    refused: set[int] = set()
    try:
        listener = _listener(port)
    except OSError as error:
        raise _port_error(port, error) from None
    with closing(listener):
        while missing:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise PrimusError(
                    f"node {', '.join(map(str, sorted(missing)))} of {nnodes} did not come within {timeout_s:.0f} s",
                    f"start the same command there with --node-rank N, and let it reach port {port} of this node",
                ) from None
            with connection:
                connection.settimeout(10)
                hello = _receive(connection, Hello)
                if hello is None:
                    continue
                same = hello.fingerprint == fingerprint
                answer = welcome if same else Welcome("", 0, "its configuration differs from that of node 0")
                connection.sendall(msgspec.json.encode(answer) + b"\n")
                missing.discard(hello.node_rank)
                refused |= set() if same else {hello.node_rank}
    if refused:
        raise UsageError(
            f"node {', '.join(map(str, sorted(refused)))} was started with another configuration than node 0",
            "use the same experiment file, overrides and number of processes on every node",
        )


def join(address: str, port: int, node_rank: int, fingerprint: str, timeout_s: float) -> Welcome:
    """Another node: ask node 0 for the run, trying until it listens.

    Raises:
        PrimusError: Node 0 was not reached in time, or refuses this node.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=10) as connection:
                connection.sendall(msgspec.json.encode(Hello(node_rank, fingerprint)) + b"\n")
                answer = _receive(connection, Welcome)
        except OSError as error:
            answer, reason = None, str(error)
        else:
            reason = "it closed the connection"
        if answer is not None:
            break
        if time.monotonic() > deadline:
            raise PrimusError(f"node 0 at {address}:{port} was not reached in {timeout_s:.0f} s: {reason}", "is it started?")
        time.sleep(RETRY_S)
    if answer.refusal:
        raise UsageError(f"node 0 refuses node {node_rank}: {answer.refusal}", "use the same files and options on every node")
    return answer


def _listener(port: int) -> socket.socket:
    return socket.create_server(("", port), reuse_port=False)


def _port_error(port: int, error: OSError) -> PrimusError:
    return PrimusError(f"port {port} cannot be used: {error.strerror}", "choose another --master-port, the same on every node")


def _receive(connection: socket.socket, kind: type) -> object:
    """One JSON line as a `kind`; None where the other side sends something else or nothing."""
    data = b""
    while not data.endswith(b"\n") and len(data) < 65536:
        try:
            part = connection.recv(4096)
        except OSError:
            return None
        if not part:
            break
        data += part
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None

"""Nodes that are started one by one agree on their run before any worker starts.

Node 0 listens on the port that torchelastic's rendezvous uses afterwards. Each other node connects, sends a
`JoinRequest` and waits for the `JoinReply`, which names the run; node 0 sends it once all nodes have joined. Where a
node does not join, has another configuration or fails before, node 0 sends the reason and nothing starts. The
connections remain open for the control channel.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import NamedTuple

from msgspec import Struct, structs

from primus.errors import EXIT_FAILED, EXIT_USAGE, PrimusError, UsageError
from primus.launch.nodes.message_stream import Deadline, MessageStream, accept_stream, converse_with_head, open_listener
from primus.machine.cluster import find_node_name
from primus.plan import Variable

REQUEST_LIMIT_S = 10.0
"""Time for a connection to send its request, which nodes do at once: a port scanner must not block node 0 for long."""
REPLY_LIMIT_S = 10.0
"""Time for a reply to fit into the buffers of a node, which waits for it."""
ABORT_REPLY_S = 30.0
"""Time that node 0 stays after a failure, to tell nodes that have not joined yet; others report that it is missing."""


class HeadAddress(NamedTuple):
    """Where node 0 listens."""

    host: str
    port: int


class JoinRequest(Struct, frozen=True):
    """First message of a node."""

    node_rank: int
    fingerprint: str
    """Hash of what must be equal on all nodes."""
    failure: str = ""
    """Why this node cannot start."""
    exit_code: int = EXIT_FAILED
    host: str = ""
    place: tuple[str, ...] = ()
    """Switches above this node, outermost first, where it knows them."""


class RendezvousPeer(Struct, frozen=True):
    """A node that has joined."""

    stream: MessageStream
    host: str = ""
    place: tuple[str, ...] = ()


class JoinReply(Struct, frozen=True):
    """Reply of node 0."""

    run_id: str
    attempt: int
    refusal: str = ""
    """Why the requesting node is rejected."""
    failure: str = ""
    """Why nothing starts on any node."""
    exit_code: int = EXIT_USAGE
    env: dict[str, Variable] = {}
    """Variables that are set once for all nodes."""
    extra: tuple[str, ...] = ()
    """Arguments that change the experiment on all nodes."""
    host: str = ""
    """Name of node 0's host."""
    node_rank: int | None = None
    """Rank of the requesting node from now on; None if it keeps its own."""


AssignRanks = Callable[[Mapping[int, RendezvousPeer]], Mapping[int, int]]
"""Gives the nodes other than 0 their ranks, from the nodes by the ranks that they joined with."""


class NodeFailed(PrimusError):
    """Another node cannot start; ends this one with its exit code."""

    def __init__(self, problem: str, exit_code: int) -> None:
        super().__init__(problem)
        self.exit_code = exit_code


def check_port_free(port: int) -> None:
    """Raises PrimusError where another program listens on `port` of this machine."""
    # Checked before hooks run, which may take an hour; the rendezvous opens the port again.
    open_listener(port).close()


def lead_rendezvous(
    port: int,
    nnodes: int,
    reply: JoinReply,
    fingerprint: str,
    timeout_s: float,
    kept: dict[int, RendezvousPeer] | None = None,
    assign_ranks: AssignRanks = lambda peers: {},
) -> None:
    """Node 0: wait until all nodes have joined, then send each of them the run, or the reason why nothing starts.

    Args:
        port: Where node 0 listens.
        nnodes: Number of nodes, node 0 included.
        reply: What the other nodes get.
        fingerprint: Hash of what must be equal on all nodes.
        timeout_s: Limit for all of them to join.
        kept: Filled with the nodes by their new ranks, whose connections then stay open.
        assign_ranks: Chooses the ranks once all have joined; a node that it leaves out keeps its own.

    Raises:
        PrimusError: The port is in use, a node did not join in time, failed, or has another configuration.
    """
    waiting: dict[int, RendezvousPeer] = {}
    with closing(open_listener(port)) as listener:
        try:
            _accept_peers(listener, nnodes, fingerprint, timeout_s, waiting, kept)
            new_ranks = assign_ranks(waiting)
        except NodeFailed as error:
            # Others may not have connected yet: they get the reason too, instead of a time-out after ten minutes.
            _send_abort(listener, nnodes, error.problem, error.exit_code, waiting, kept)
            raise
        except PrimusError as error:
            _send_replies(waiting, JoinReply("", 0, error.problem), kept)
            raise
        for rank, peer in waiting.items():
            new_rank = new_ranks.get(rank)
            own_reply = structs.replace(reply, node_rank=new_rank)
            _send_replies({rank if new_rank is None else new_rank: peer}, own_reply, kept)


def abort_rendezvous(
    port: int, nnodes: int, failure: str, exit_code: int, kept: dict[int, RendezvousPeer] | None = None
) -> None:
    """Node 0, which cannot start: tell the other nodes why, if they connect within `ABORT_REPLY_S`.

    Args:
        port: Where node 0 listens.
        nnodes: Number of nodes, node 0 included.
        failure: Why it cannot start.
        exit_code: Exit code of all nodes.
        kept: Filled with the nodes, whose connections then stay open.
    """
    with contextlib.suppress(PrimusError), closing(open_listener(port)) as listener:
        _send_abort(listener, nnodes, failure, exit_code, {}, kept)


def _send_abort(
    listener: socket.socket,
    nnodes: int,
    failure: str,
    exit_code: int,
    waiting: dict[int, RendezvousPeer],
    kept: dict[int, RendezvousPeer] | None,
) -> None:
    """Tell the nodes that wait, and those that connect within a short time, that nothing starts."""
    reply = JoinReply("", 0, failure=failure, exit_code=exit_code)
    _send_replies(waiting, reply, kept)
    informed = set(waiting)  # by rank: a node that is started again counts once
    deadline = Deadline(ABORT_REPLY_S)
    while len(informed) < nnodes - 1 and not deadline.is_over:
        request, peer = _accept_request(listener, deadline)
        if request is not None and peer is not None:
            informed.add(request.node_rank)
            _send_replies({request.node_rank: peer}, reply, kept)


def _accept_request(
    listener: socket.socket, deadline: Deadline
) -> tuple[JoinRequest, RendezvousPeer] | tuple[None, None]:
    """The next node that connects; None if the time is up, or another program connected."""
    accepted = accept_stream(listener, deadline)
    if accepted is None:
        return None, None
    stream, _ = accepted
    request = stream.receive(JoinRequest, Deadline(REQUEST_LIMIT_S))
    if request is None:
        stream.close()
        return None, None
    return request, RendezvousPeer(stream, request.host, request.place)


def _accept_peers(
    listener: socket.socket,
    nnodes: int,
    fingerprint: str,
    timeout_s: float,
    waiting: dict[int, RendezvousPeer],
    kept: dict[int, RendezvousPeer] | None,
) -> None:
    """Fill `waiting` with a connection of each other node; that of a rejected node goes to `kept`."""
    deadline = Deadline(timeout_s)
    # A node may die while it waits, so every round checks the connections again.
    while missing := [rank for rank in range(1, nnodes) if not _is_connected(waiting.get(rank))]:
        if deadline.is_over:
            raise PrimusError(
                f"node {', '.join(map(str, missing))} of {nnodes} did not join within {timeout_s:.0f} s",
                f"start the same command there with --node-rank N, and open port {listener.getsockname()[1]} of node 0",
            )
        request, peer = _accept_request(listener, deadline)
        if request is None or peer is None:
            continue
        # Refused, and not kept: a second copy of a node that is here, or a node of another job.
        rank = request.node_rank
        if rank not in range(1, nnodes) or _is_connected(waiting.get(rank)):
            refusal = f"the nodes are 1 to {nnodes - 1}, each started once"
            _send_replies({rank: peer}, JoinReply("", 0, refusal))
        elif request.failure:
            waiting[rank] = peer  # it gets the reply too, and takes part in the exit barrier
            raise NodeFailed(request.failure, request.exit_code)
        elif request.fingerprint != fingerprint:
            _send_replies({rank: peer}, JoinReply("", 0, "its configuration differs from that of node 0"), kept)
            raise UsageError(
                f"node {rank} was started with another configuration than node 0",
                "use the same experiment file, overrides and number of processes on every node",
            )
        else:
            if rank in waiting:  # its launcher died while it waited, and was started again
                waiting.pop(rank).stream.close()
            waiting[rank] = peer


def _send_replies(
    peers: Mapping[int, RendezvousPeer], reply: JoinReply, kept: dict[int, RendezvousPeer] | None = None
) -> None:
    """Answer nodes by their rank; their connections go to `kept`, or are closed."""
    for rank, peer in peers.items():
        with contextlib.suppress(OSError):  # the control channel detects that a node has exited
            peer.stream.send(reply, REPLY_LIMIT_S)
        if kept is None:  # the caller has no control channel
            peer.stream.close()
        else:
            kept[rank] = peer


def _is_connected(peer: RendezvousPeer | None) -> bool:
    return peer is not None and peer.stream.is_open()


def join_rendezvous(
    head: HeadAddress,
    node_rank: int,
    fingerprint: str,
    timeout_s: float,
    kept: dict[int, RendezvousPeer] | None = None,
    place: tuple[str, ...] = (),
) -> JoinReply:
    """Another node: ask node 0 for the run, trying until it listens, and wait until all nodes have joined.

    Args:
        head: Where node 0 listens.
        node_rank: Of this node.
        fingerprint: Hash of what must be equal on all nodes.
        timeout_s: Limit for all of them to join.
        kept: Filled with node 0, whose connection then stays open.
        place: Switches above this node, outermost first.

    Raises:
        PrimusError: Node 0 was not reached in time, or refuses this node.
        NodeFailed: A node cannot start.
    """
    request = JoinRequest(node_rank, fingerprint, host=find_node_name(), place=place)
    reply = _request_join(head, request, timeout_s, kept)
    if reply.failure:
        raise NodeFailed(reply.failure, reply.exit_code)
    if reply.refusal:
        raise UsageError(
            f"node 0 refuses node {node_rank}: {reply.refusal}", "use the same files and options on every node"
        )
    return reply


def abort_join(
    head: HeadAddress,
    node_rank: int,
    failure: str,
    exit_code: int,
    timeout_s: float,
    kept: dict[int, RendezvousPeer] | None = None,
) -> None:
    """Another node, which cannot start: tell node 0, and through it all nodes; `kept` as in `join_rendezvous`.

    Raises:
        PrimusError: Node 0 was not reached in time.
    """
    _request_join(head, JoinRequest(node_rank, "", failure, exit_code), timeout_s, kept)


def _request_join(
    head: HeadAddress, request: JoinRequest, timeout_s: float, kept: dict[int, RendezvousPeer] | None
) -> JoinReply:
    def ask_for_run(stream: MessageStream, deadline: Deadline) -> JoinReply | None:
        stream.send(request, REQUEST_LIMIT_S)
        return stream.receive(JoinReply, deadline)  # node 0 replies once all nodes have joined

    stream, reply = converse_with_head(*head, timeout_s, ask_for_run)
    if kept is None:
        stream.close()
    else:
        kept[0] = RendezvousPeer(stream, reply.host or head.host)
    return reply

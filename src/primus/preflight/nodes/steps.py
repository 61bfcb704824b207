"""Steps that all nodes run together: node 0 sends requests, every node handles its own, and node 0 collects the
replies.

Each step is one exchange of `launch.nodes.report_collection`: the nodes deliver their replies to the last requests,
and node 0 answers with the next ones. A node that does not respond in time ends the session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Generic, TypeVar

import msgspec

from primus.errors import PrimusError
from primus.launch.nodes import report_collection
from primus.launch.nodes.report_collection import NodeArrival, ReportCollector
from primus.machine.cluster import ClusterLayout

Order = TypeVar("Order")
Reply = TypeVar("Reply")
PORT_LIMIT_S, RETRY_S = 5.0, 0.05
Perform = Callable[[Order], Reply]


class StepLeader(Generic[Order, Reply]):
    """Node 0's side: `__enter__` waits for the other nodes, `__exit__` releases them.

    Args:
        layout: Layout of the launch.
        host: Name of this node.
        perform: Handles the requests to this node.
        reply_type: Type of each node's reply.
        limit_s: Time limit of one step.
        arrival_limit_s: Time limit of the first exchange, since nodes may arrive late; default `limit_s`.

    Raises:
        PrimusError: The port is in use.
    """

    def __init__(
        self,
        layout: ClusterLayout,
        host: str,
        perform: Perform[Order, Reply],
        reply_type: type[Reply],
        limit_s: float,
        arrival_limit_s: float | None = None,
    ) -> None:
        self._layout, self._host, self._perform, self._limit_s = layout, host, perform, limit_s
        self._arrival_limit_s = arrival_limit_s or limit_s
        self._reply_type = reply_type
        self._meeting: ReportCollector | None = None
        self.lost: tuple[int, ...] = ()
        """Ranks of the nodes that did not respond in time."""

    def __enter__(self) -> StepLeader[Order, Reply]:
        self._collect_replies(self._arrival_limit_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send_requests({})

    def request_step(self, orders: Mapping[int, Order]) -> dict[int, Reply]:
        """The replies to `orders`, by node rank; empty after a node has been lost."""
        # States: open (every node waits for requests) -> lost (a node is missing). Lost is final: the remaining nodes
        # are released by __exit__, and later steps would only measure without a partner.
        if self.lost:
            return {}
        self._send_requests(orders)
        # Node 0 does its own part between sending and collecting, while the other nodes do theirs.
        replies = {0: self._perform(orders[0])} if 0 in orders else {}
        return replies | {rank: reply for rank, reply in self._collect_replies(self._limit_s).items() if rank in orders}

    def _send_requests(self, orders: Mapping[int, Order]) -> None:
        # The answer of the previous exchange carries the requests. Without an open exchange no node waits for them.
        if self._meeting is not None:
            self._meeting.send_answer(msgspec.json.encode({str(rank): order for rank, order in orders.items()}))
            self._meeting.__exit__()
            self._meeting = None

    def _collect_replies(self, limit_s: float) -> dict[int, Reply]:
        if self._layout.nnodes == 1:
            return {}
        self._meeting = self._open_meeting(limit_s)
        found: dict[int, Reply] = {}
        came = self._meeting.collect_reports(self._host)
        self.lost = tuple(sorted({*range(1, self._layout.nnodes)} - {node.node_rank for node in came}))
        for node in came:
            reply = _decode_reply(node.report or b"", self._reply_type)
            if reply is not None:
                found[node.node_rank] = reply
        return found

    def _open_meeting(self, limit_s: float) -> ReportCollector:
        """A collector on the port of the previous one; retried for `PORT_LIMIT_S` while the port is in use."""
        assert self._layout.master_port is not None
        # A child process that starts meanwhile inherits the previous listener until its exec closes it.
        deadline = time.monotonic() + PORT_LIMIT_S
        while True:
            try:
                return ReportCollector(self._layout.master_port, self._layout.nnodes, limit_s)
            except PrimusError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_S)


def follow_steps(
    layout: ClusterLayout,
    host: str,
    perform: Perform[Order, Reply],
    order_type: type[Order],
    limit_s: float,
    arrival_limit_s: float | None = None,
) -> None:
    """Another node's side: handle the requests of node 0 until it sends none, or is not reachable."""
    assert layout.master_port is not None
    # The first report is empty: it only announces the node. Node 0 may still be measuring, hence the longer first
    # limit.
    report, patience_s = b"null", arrival_limit_s or limit_s
    while True:
        arrival = NodeArrival(node_rank=layout.node_rank, host=host, time=time.time())
        try:
            answer = report_collection.deliver_report(
                layout.master_addr, layout.master_port, arrival, report, patience_s
            )
        except PrimusError:
            return
        patience_s = limit_s
        orders = _decode_reply(answer or b"", dict[int, order_type])  # type: ignore[valid-type]
        # No requests at all, or no answer: the leader has left its context.
        if not orders:
            return
        # A node without an own request still takes part, with an empty reply: every node is in every exchange.
        own = orders.get(layout.node_rank)
        report = msgspec.json.encode(perform(own)) if own is not None else b"null"


def _decode_reply(text: bytes, kind: type[Reply]) -> Reply | None:
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except msgspec.MsgspecError:
        return None

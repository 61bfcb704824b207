"""Steps that nodes take together: node 0 orders, every node does its part, and node 0 hears the replies.

Each step is one exchange of `launch.gather`: the nodes deliver the replies to the last orders, and node 0 answers with
the next ones. Where a node does not come in time, that was the last step.
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
    """Node 0's side, between `__enter__`, which waits for the other nodes, and `__exit__`, which lets them go.

    Args:
        layout: Of the launch.
        host: Name of this node.
        perform: Does this node's own part of a step.
        reply_type: What each node replies.
        limit_s: Time that one step may take.
        arrival_limit_s: Time that the nodes may take to come, by which one may be behind the others.

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
        """Ranks of the nodes that did not come in time."""

    def __enter__(self) -> StepLeader[Order, Reply]:
        self._collect_replies(self._arrival_limit_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send_requests({})

    def request_step(self, orders: Mapping[int, Order]) -> dict[int, Reply]:
        """What the nodes reply to their orders, by node rank; nothing where a node has been lost."""
        if self.lost:
            return {}
        self._send_requests(orders)
        replies = {0: self._perform(orders[0])} if 0 in orders else {}
        return replies | {rank: reply for rank, reply in self._collect_replies(self._limit_s).items() if rank in orders}

    def _send_requests(self, orders: Mapping[int, Order]) -> None:
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
        """A meeting on the port of the last one, which a program that is just being started may hold for a moment."""
        assert self._layout.master_port is not None
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
    """Another node's side: perform what node 0 orders until it lets this node go, or is gone."""
    assert layout.master_port is not None
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
        if not orders:
            return
        own = orders.get(layout.node_rank)
        report = msgspec.json.encode(perform(own)) if own is not None else b"null"


def _decode_reply(text: bytes, kind: type[Reply]) -> Reply | None:
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except msgspec.MsgspecError:
        return None

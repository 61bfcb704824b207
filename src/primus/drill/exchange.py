"""Nodes of a drill and node 0: each node reports what it did and asks for its next order.

    node k                                            node 0
    NodeDrillReport: what it may do, its last launch   ->
                                                  <-  LaunchOrder, once all nodes have reported

A connection lasts from a report to its order, and none while a launch runs: a drill takes down networks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from contextlib import closing

from msgspec import Struct

from primus.drill.fault_kinds import FaultName
from primus.errors import PrimusError
from primus.launch.nodes.message_stream import Deadline, MessageStream, accept_stream, converse_with_head, open_listener
from primus.machine.cluster import ClusterLayout, find_node_name

REPORT_LIMIT_S = 10.0
"""Time for a connection to send its report, and for an order to fit into the buffers of a node."""


class PlantReport(Struct, frozen=True, kw_only=True):
    """A fault as it was planted."""

    planted_at: float | None = None
    """By the clock of node 0; None if it was not planted."""
    step: int = 0
    """Last step of the rank before it."""
    rank: int | None = None
    problem: str = ""
    """Why it was not planted."""


class NodeDrillReport(Struct, frozen=True, kw_only=True):
    """What a node tells node 0."""

    node_rank: int
    host: str
    obstacles: dict[str, str] = {}
    """Why faults cannot be planted on it, by their names."""
    planted: PlantReport | None = None
    """In its last launch."""
    exit_code: int | None = None
    """Of its last launch."""


class LaunchOrder(Struct, frozen=True, kw_only=True):
    """What a node does next."""

    time: float
    """Clock of node 0 when it sends this."""
    place: str = ""
    """Folder of the launch: its workspace and its logs; empty at the end of the drill."""
    options: tuple[str, ...] = ()
    """Options of `direct`, after those that the user typed."""
    words: tuple[str, ...] = ()
    """Settings of the experiment, after those that the user typed."""
    limit_s: float = 0.0
    """Time after which the launch is killed."""
    fault: FaultName | None = None
    target: int = 0
    """Node on which it is planted."""
    after_step: int = 0
    """It is planted as soon as the rank has taken this step."""


class HeadExchange:
    """Node 0's side.

    Args:
        layout: Nodes of the drill.
        port: Where it listens.
    """

    def __init__(self, layout: ClusterLayout, port: int) -> None:
        self._layout, self._port = layout, port
        self._waiting: dict[int, MessageStream] = {}

    def collect_reports(self, own: NodeDrillReport, limit_s: float) -> dict[int, NodeDrillReport]:
        """The reports of all nodes, by their ranks.

        Raises:
            PrimusError: A node did not report in time, or the port is in use.
        """
        reports = {own.node_rank: own}
        if self._layout.nnodes == 1:
            return reports
        deadline = Deadline(limit_s)
        with closing(open_listener(self._port)) as listener:
            while missing := [rank for rank in range(1, self._layout.nnodes) if rank not in self._waiting]:
                if deadline.is_over:
                    nodes = ", ".join(map(str, missing))
                    raise PrimusError(
                        f"drill: node {nodes} of {self._layout.nnodes} did not report within {limit_s:.0f} s",
                        f"start the same command on each node, and open port {self._port} of node 0",
                    )
                accepted = accept_stream(listener, deadline)
                report = accepted[0].receive(NodeDrillReport, Deadline(REPORT_LIMIT_S)) if accepted else None
                if accepted and report is not None and report.node_rank in missing:
                    self._waiting[report.node_rank], reports[report.node_rank] = accepted[0], report
                elif accepted:
                    accepted[0].close()
        return reports

    def send_order(self, order: LaunchOrder) -> None:
        """Send the order to the nodes that wait; one that has gone is missed in the next collection."""
        for stream in self._waiting.values():
            with contextlib.suppress(OSError):
                stream.send(order, REPORT_LIMIT_S)
            stream.close()
        self._waiting.clear()


def request_order(
    layout: ClusterLayout, port: int, report: NodeDrillReport, limit_s: float
) -> tuple[LaunchOrder, float]:
    """Another node: report, and wait for the next order; gives it and the clock of node 0 minus that of this node.

    Raises:
        PrimusError: Node 0 is not reached, or ends.
    """

    def converse(stream: MessageStream, deadline: Deadline) -> LaunchOrder | None:
        stream.send(report, REPORT_LIMIT_S)
        return stream.receive(LaunchOrder, deadline)

    stream, order = converse_with_head(layout.master_addr, port, limit_s, converse)
    stream.close()
    return order, order.time - time.time()


def make_report(layout: ClusterLayout, obstacles: Mapping[str, str]) -> NodeDrillReport:
    """The first report of this node."""
    return NodeDrillReport(node_rank=layout.node_rank, host=find_node_name(), obstacles=dict(obstacles))

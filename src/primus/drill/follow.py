"""Another node of a drill than node 0: report, launch what node 0 orders, report again."""

from __future__ import annotations

from msgspec import structs

from primus.drill.drilled_launch import DrilledJob, run_launch
from primus.drill.exchange import NodeDrillReport, request_order
from primus.machine.cluster import ClusterLayout

WAIT_MARGIN_S = 120.0
"""Time that a node waits for node 0 beyond the time of the drill."""


def follow_orders(job: DrilledJob, layout: ClusterLayout, port: int, report: NodeDrillReport, minutes: float) -> None:
    """Launch what node 0 orders until the drill ends.

    Raises:
        PrimusError: Node 0 is not reached.
    """
    while True:
        order, offset_s = request_order(layout, port, report, 60 * minutes + WAIT_MARGIN_S)
        if not order.place:
            return
        code, planted = run_launch(order, job, layout.node_rank, offset_s, None)
        report = structs.replace(report, planted=planted, exit_code=code)

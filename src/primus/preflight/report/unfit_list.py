"""Record nodes that fail a preflight in the list of unfit nodes."""

from __future__ import annotations

from primus.errors import PrimusError
from primus.preflight.nodes.cluster import ClusterReport
from primus.preflight.report import formats as report
from primus.runs.unfit_nodes import NodeRecord, add_record
from primus.task import TaskContext

NUM_REASONS = 3
"""Reasons in a record; the report has all."""


def record_failing_nodes(judged: ClusterReport, context: TaskContext) -> None:
    """Record the nodes that fail, if other nodes pass the same checks.

    If all fail, the site or an option is to blame, such as a wrong --expected-gpus. A node that did not respond is not
    recorded: its scheduler knows whether it is there.
    """
    reported = [one.host for one in judged.nodes]
    failing = [host for host in judged.list_hosts("fail") if host in reported]
    if not judged.list_hosts("pass"):
        return
    for host in failing:
        record_unfit_node(host, list(report.list_reasons(judged, host)), judged.id, context)


def record_unfit_node(host: str, reasons: list[str], preflight: str, context: TaskContext) -> None:
    """Record one node; a list that cannot be written is reported."""
    text = "; ".join(reasons[:NUM_REASONS]) or "it failed"
    record = NodeRecord(node=host, kind="unfit", reason=f"preflight: {text}", time=0, source="preflight", run=preflight)
    try:
        add_record(context.environ, record)
    except (PrimusError, OSError) as error:
        context.say(f"{host} is not recorded in the list of unfit nodes: {error}")
        return
    context.say(f"{host} is recorded in the list of unfit nodes; jobs avoid it until nodes check {host} clears it")

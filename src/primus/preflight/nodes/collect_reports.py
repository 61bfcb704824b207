"""Exchange of reports between the nodes of a launch: node 0 collects all reports, judges them and sends its
decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from primus.launch.nodes import report_collection
from primus.launch.nodes.report_collection import CollectedReport, NodeArrival, ReportCollector
from primus.machine.cluster import ClusterLayout
from primus.preflight.findings.finding import CheckFinding, NodeReport
from primus.preflight.findings.node import format_names
from primus.preflight.findings.rules import About, judge
from primus.preflight.nodes import cluster
from primus.preflight.nodes.cluster import ClusterReport, Verdict


class PreflightDecision(Struct, frozen=True, kw_only=True):
    """Decision that node 0 sends to the other nodes."""

    hosts: dict[int, str]
    """Name of each node in the report, by rank."""
    verdicts: dict[str, Verdict]
    reasons: dict[str, tuple[str, ...]] = {}
    """Reasons of the nodes that are not fit, by host."""
    goes_on: bool = True
    """Whether all nodes have reported, so that they can be measured together."""


JudgedReports = tuple[ClusterReport, PreflightDecision]
Judge = Callable[[Sequence[NodeReport], Sequence[CheckFinding]], JudgedReports]
"""Builds the cluster report and the decision from the reports of the nodes and the findings between them."""


def collect_reports(
    own: NodeReport,
    layout: ClusterLayout,
    skew_limit_s: float,
    timeout_s: float,
    judge: Judge,
    names: Sequence[str] = (),
) -> tuple[ClusterReport, PreflightDecision]:
    """Node 0: collect the reports of all nodes within the time limit, judge them and send the decision.

    Args:
        names: Known host names of the nodes by rank, to name nodes that do not respond.

    Raises:
        PrimusError: The port is in use.
    """
    assert layout.master_port is not None
    # Every node calls this function or `send_report` at the same point of its run. The collector listens on the port
    # of the rendezvous, which is free before the workers start and after they exit.
    with ReportCollector(layout.master_port, layout.nnodes, timeout_s) as meeting:
        came = meeting.collect_reports(own.host)
        reports = _select_distinct_hosts([own, *_decode_reports(came)])
        hosts = {report.node_rank: report.host for report in reports}
        # A node is absent if it did not connect, timed out after it arrived, or sent a report that cannot be decoded.
        absent = [_format_node_name(rank, names) for rank in range(layout.nnodes) if rank not in hosts]
        unreached = {0: meeting.unreached} | {node.node_rank: node.unreached for node in came}
        # Offsets include the delay of the arrival message, milliseconds, which is far below the allowed skew of
        # seconds.
        offsets_s = {hosts[node.node_rank]: node.offset_s for node in came if node.node_rank in hosts}
        between = [
            *cluster.compare_nodes(reports, skew_limit_s, offsets_s),
            *_report_unreachable_nodes(unreached, hosts),
            *cluster.report_missing_nodes(absent, timeout_s),
        ]
        report, decision = judge(reports, between)
        decision = structs.replace(decision, hosts=hosts, goes_on=not absent)
        # The other nodes block until this answer: it is sent also if nodes are absent, so that the rest exit with a
        # verdict.
        meeting.send_answer(msgspec.json.encode(decision))
    return report, decision


def send_report(own: NodeReport, layout: ClusterLayout, now: float, timeout_s: float) -> PreflightDecision | None:
    """Another node: send its report and return node 0's decision; None if node 0 sent none.

    Raises:
        PrimusError: Node 0 was not reached.
    """
    assert layout.master_port is not None
    arrival = NodeArrival(node_rank=layout.node_rank, host=own.host, time=now)
    answer = report_collection.deliver_report(
        layout.master_addr, layout.master_port, arrival, msgspec.json.encode(own), timeout_s
    )
    try:
        return msgspec.json.decode(answer, type=PreflightDecision) if answer else None
    except msgspec.MsgspecError:
        return None


def _decode_reports(came: Iterable[CollectedReport]) -> Iterator[NodeReport]:
    """The reports that can be decoded; a node whose report cannot be decoded counts as missing."""
    for node in came:
        try:
            report = msgspec.json.decode(node.report or b"", type=NodeReport)
        except msgspec.MsgspecError:
            continue
        # The rank of the connection counts, not the one in the report: node 0 has checked that it is unique.
        yield structs.replace(report, node_rank=node.node_rank)


def _select_distinct_hosts(reports: Sequence[NodeReport]) -> list[NodeReport]:
    """Reports with distinct host names: several nodes may be containers on one host."""
    hosts = [report.host for report in reports]
    return [
        structs.replace(report, host=f"{report.host}-{report.node_rank}") if hosts.count(report.host) > 1 else report
        for report in reports
    ]


def _format_node_name(rank: int, names: Sequence[str]) -> str:
    return names[rank].partition(".")[0] if rank < len(names) else f"node-{rank}"


def _report_unreachable_nodes(
    unreached: Mapping[int, Sequence[int]], hosts: Mapping[int, str]
) -> Iterator[CheckFinding]:
    """Nodes that other nodes cannot connect to; a node that reaches less than half of the others is itself at fault."""
    for rank, host in sorted(hosts.items()):
        lonely = len(unreached.get(rank, ())) > (len(hosts) - 1) / 2
        by = [hosts[other] for other, missed in sorted(unreached.items()) if rank in missed and other in hosts]
        if not by and not lonely:
            continue
        measured = f"reaches no more than {len(hosts) - 1 - len(unreached[rank])} nodes" if lonely else ""
        measured += f"{'; ' if lonely and by else ''}not reached by {format_names(by)}" if by else ""
        yield judge("cluster.connect", False, measured, About(host=host))

"""What has changed on the nodes of a cluster since the last check, and which of their links are the slowest."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from primus.preflight.cluster_check.result import NodeCheckResult
from primus.preflight.findings.finding import ORDER, CheckFinding

LINK_CHECKS = (
    *("host_to_device", "device_to_host", "pairs", "send_recv", "rdma_bandwidth"),
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
)
"""Checks of `performance` that measure links, between devices, to the host, or of the ports of the network."""
RATE = re.compile(r"/s\b|MHz")
"""In the measured value of a rate or a clock."""
NUM_SLOWEST = 10
"""Links on the page."""


class NodeChange(Struct, frozen=True, kw_only=True):
    """A difference between two checks of one node."""

    node: str
    kind: Literal["better", "worse", "changed"]
    what: str
    """A property (`kernel`), or a check and its subject (`memory_copy GPU 3`)."""
    before: str
    now: str


class SlowLink(Struct, frozen=True, kw_only=True):
    """A measured link, compared with the same link of the other nodes."""

    node: str
    link: str
    measured: str
    share: float
    """Bandwidth as a share of the median of all nodes."""
    num_nodes: int
    """Nodes with this figure."""


def find_changes(
    results: Mapping[str, NodeCheckResult], earlier: Mapping[str, Sequence[NodeCheckResult]], tolerance_percent: float
) -> list[NodeChange]:
    """Changes of each node since its last check.

    Args:
        results: Results of this check.
        earlier: Earlier results of each node, newest first.
        tolerance_percent: A figure has changed if it lies this far outside of the range of the earlier ones.
    """
    found = [
        change
        for node, result in sorted(results.items())
        if earlier.get(node)
        for change in _compare_results(result, earlier[node], tolerance_percent / 100)
    ]
    order = ("worse", "changed", "better")
    return sorted(found, key=lambda change: order.index(change.kind))


def _compare_results(
    now: NodeCheckResult, earlier: Sequence[NodeCheckResult], tolerance: float
) -> Iterator[NodeChange]:
    last = earlier[0]
    for name in dict.fromkeys([*last.report.stack, *now.report.stack]):
        before, after = last.report.stack.get(name, "none"), now.report.stack.get(name, "none")
        if before != after:
            yield NodeChange(node=now.node, kind="changed", what=name, before=before, now=after)
    histories = [_index_findings(each) for each in earlier]
    for key, finding in _index_findings(now).items():
        yield from _compare_findings(now.node, finding, [each[key] for each in histories if key in each], tolerance)


def _index_findings(result: NodeCheckResult) -> dict[tuple[str, str], CheckFinding]:
    """Findings by check and subject; the worst of several."""
    found: dict[tuple[str, str], CheckFinding] = {}
    for finding in sorted(result.all_findings, key=lambda each: ORDER.index(each.status)):
        found[finding.check, finding.subject] = finding
    return found


def _compare_findings(
    node: str, now: CheckFinding, earlier: Sequence[CheckFinding], tolerance: float
) -> Iterator[NodeChange]:
    what = f"{now.check.removeprefix('performance.')} {now.subject}".rstrip()
    before = earlier[0] if earlier else None
    is_urgent, was_urgent = (each is not None and ORDER.index(each.status) > 1 for each in (now, before))
    if (is_urgent or was_urgent) and (before is None or before.status != now.status):
        is_worse = before is None or ORDER.index(now.status) > ORDER.index(before.status)
        shown = f"{before.status}: {before.measured}" if before else "none"
        kind: Literal["better", "worse"] = "worse" if is_worse else "better"
        yield NodeChange(node=node, kind=kind, what=what, before=shown, now=f"{now.status}: {now.measured}")
        return
    # Temperatures and memory in use vary with the hour: only rates and clocks are compared, more of which is better.
    values = [each.value for each in earlier if each.value]
    if before is None or not now.value or not values or not (now.group == "performance" and RATE.search(now.measured)):
        return
    if now.value < min(values) * (1 - tolerance):
        yield NodeChange(node=node, kind="worse", what=what, before=before.measured, now=now.measured)
    elif now.value > max(values) * (1 + tolerance):
        yield NodeChange(node=node, kind="better", what=what, before=before.measured, now=now.measured)


def find_slowest_links(results: Mapping[str, NodeCheckResult]) -> list[SlowLink]:
    """The links with the lowest bandwidth in relation to the same link of all nodes, none above their median."""
    figures: dict[str, list[tuple[str, CheckFinding]]] = defaultdict(list)
    for node, result in results.items():
        for finding in result.all_findings:
            group, _, name = finding.check.partition(".")
            if group == "performance" and name in LINK_CHECKS and finding.value:
                figures[name].append((node, finding))
    found = []
    for name, measured in figures.items():
        median = statistics.median(finding.value or 0.0 for _, finding in measured)
        num_nodes = len({node for node, _ in measured})
        for node, finding in measured:
            link, share = f"{name} {finding.subject}".rstrip(), (finding.value or 0.0) / median
            found.append(SlowLink(node=node, link=link, measured=finding.measured, share=share, num_nodes=num_nodes))
    return sorted((link for link in found if link.share <= 1), key=lambda link: link.share)[:NUM_SLOWEST]

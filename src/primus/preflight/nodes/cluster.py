"""Compare the nodes of a preflight: differences, verdicts, and nodes that did not respond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from primus.machine.tree import build_sort_key
from primus.preflight.findings.finding import CheckFinding, NodeReport, find_worst_status
from primus.preflight.findings.node import format_names
from primus.preflight.findings.rules import About, judge

Verdict = Literal["pass", "unknown", "fail"]
MUST_AGREE = ("GPU model", "GPU count", "RDMA ports")
"""Properties that must be the same on all nodes for a job to run well."""


class ClusterReport(Struct, frozen=True, kw_only=True):
    """Findings about all nodes of one preflight."""

    id: str
    """ID of this preflight, derived from the start time of node 0."""
    version: str
    """Version of primus."""
    checks: tuple[str, ...]
    """Groups of checks that were requested."""
    world_size: int = 1
    nodes: tuple[NodeReport, ...] = ()
    """Reports of the nodes, in the order of their ranks."""
    findings: tuple[CheckFinding, ...] = ()
    """Findings that compare nodes or concern nodes that did not respond; `host` names the node."""
    expected_nodes: tuple[str, ...] = ()
    """Short host names, sorted; a node that did not respond and has no known name is ``node-<rank>``."""
    ignored: tuple[str, ...] = ()
    """Checks that were ignored by name."""
    is_strict: bool = False
    """Whether warnings make a node unfit."""
    duration_s: float = 0.0
    """Duration of the whole preflight, including measurements."""

    def list_host_findings(self, host: str) -> list[CheckFinding]:
        """All findings of one node, without the ignored ones."""
        own = [finding for node in self.nodes if node.host == host for finding in node.findings if not finding.host]
        about = [finding for node in self.nodes for finding in node.findings if finding.host == host]
        about += [finding for finding in self.findings if finding.host == host]
        return [finding for finding in [*own, *about] if finding.check not in self.ignored]

    def list_general_findings(self) -> list[CheckFinding]:
        """Findings that concern no node known by name, without the ignored ones."""
        return [
            finding
            for finding in self.findings
            if finding.host not in self.expected_nodes and finding.check not in self.ignored
        ]

    def judge_host(self, host: str) -> Verdict:
        """Whether one node is fit."""
        return _judge_findings(self.list_host_findings(host), is_strict=self.is_strict)

    @property
    def overall_verdict(self) -> Verdict:
        """The worst verdict of all nodes and of the findings that concern all of them."""
        verdicts = [
            _judge_findings(self.list_general_findings(), is_strict=self.is_strict),
            *map(self.judge_host, self.expected_nodes),
        ]
        return max(verdicts, key=("pass", "unknown", "fail").index)

    def list_hosts(self, verdict: Verdict) -> list[str]:
        """Short names of the nodes with this verdict, sorted."""
        return [host for host in self.expected_nodes if self.judge_host(host) == verdict]


def _judge_findings(findings: Sequence[CheckFinding], *, is_strict: bool) -> Verdict:
    status = find_worst_status(findings)
    if status == "fail" or (is_strict and any(finding.status == "warn" for finding in findings)):
        return "fail"
    return "unknown" if status == "unknown" else "pass"


def compare_nodes(
    nodes: Sequence[NodeReport], skew_limit_s: float, offsets_s: Mapping[str, float]
) -> Iterator[CheckFinding]:
    """Differences between nodes; the value of the majority is taken as correct, and the other nodes are named.

    Args:
        offsets_s: Distance of each node's clock from node 0's, by host.
    """
    if len(nodes) < 2:
        return
    names = dict.fromkeys(name for node in nodes for name in node.stack)
    for name in names:
        yield from _find_drift(name, {node.host: node.stack.get(name, "none") for node in nodes})
    for host, offset_s in sorted(offsets_s.items()):
        words = {"wanted": skew_limit_s, "value": round(offset_s, 1)}
        is_close, shown = abs(offset_s) <= skew_limit_s, f"{offset_s:+.1f} s"
        yield judge("cluster.clock_skew", is_close, shown, About(host=host), **words)


def _find_drift(name: str, values: Mapping[str, str]) -> Iterator[CheckFinding]:
    counts = Counter(values.values())
    if len(counts) < 2:
        return
    usual, votes = max(counts.items(), key=lambda item: (item[1], build_sort_key(item[0])))
    is_count = all(value.isdecimal() for value in counts)  # on a tie the larger number is right
    is_tie = list(counts.values()).count(votes) > 1 and not is_count
    check = f"cluster.{'_'.join(name.lower().replace('-', ' ').split())}"
    shown = f"{usual} on {votes} of {len(values)} nodes"
    for host, value in sorted(values.items()):
        if value == usual and not is_tie:
            continue
        words = {
            "check": check,
            "status": "fail" if name in MUST_AGREE else "warn",
            "wanted": shown if not is_tie else _format_votes(counts),
            "name": name,
        }
        yield judge("difference/count" if is_count else "difference", False, value, About(host=host), **words)


def _format_votes(counts: Mapping[str, int]) -> str:
    return "one value, found " + format_names(f"{value} on {count}" for value, count in sorted(counts.items()))


def report_missing_nodes(names: Iterable[str], limit_s: float) -> Iterator[CheckFinding]:
    """Expected nodes that did not respond."""
    for host in names:
        yield judge("cluster.missing", False, f"{limit_s:g}", About(host=host))

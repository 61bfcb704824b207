"""The check of a cluster as text, Markdown, JSON and one HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from primus import __version__
from primus.preflight.cluster_check.drift import NodeChange, SlowLink
from primus.preflight.cluster_check.result import (
    STATES,
    CheckedNode,
    CheckFolder,
    NodeCheckResult,
    NodeState,
    merge_reports,
)
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.report import formats
from primus.preflight.report.grouping import fold_hosts
from primus.report import page, table
from primus.report.markdown import format_markdown_table
from primus.runs.files import write_json, write_text

BADGES: dict[NodeState, str] = {
    "unfit": "fail", "unknown": "unknown", "no answer": "unknown", "not checked": "warn",
    "down": "warn", "drained": "warn", "busy": "info", "fit": "ok",
}  # fmt: skip
MEANINGS: dict[NodeState, str] = {
    "unfit": "preflight found a fault",
    "unknown": "could not be checked completely",
    "no answer": "its job did not start, or gave no result",
    "not checked": "the check was stopped before",
    "down": "according to the scheduler; not touched",
    "drained": "taken out of service in the scheduler; not touched",
    "busy": "runs jobs; not touched",
    "fit": "passes",
}
CHANGE_BADGES = {"worse": "warn", "changed": "info", "better": "ok"}
NODE_HEADER = ("node", "state", "reason", "list of unfit nodes", "kernel", "driver", "devices")
CHANGE_HEADER = ("node", "change", "what", "before", "now")
LINK_HEADER = ("node", "link", "measured", "of the median", "nodes")
DIFFERENCE_HEADER = ("node", "what", "found", "usual")
MOST_FIT = 40
"""Fit nodes that the page shows at once; more are in a part that opens."""


class ClusterCheck(Struct, frozen=True, kw_only=True):
    """The summary of one check: cluster.json."""

    schema: int = 1
    version: str = __version__
    id: str
    """Name of its folder."""
    began: float
    """Seconds since the epoch."""
    duration_s: float
    command: str
    """What ran on each node."""
    is_complete: bool
    """Whether all idle nodes were asked; False after an interruption."""
    nodes: tuple[CheckedNode, ...]
    """By state, those that need attention first."""
    previous: str = ""
    """The check that the changes refer to; a node that was busy then is compared with its own last check."""
    changes: tuple[NodeChange, ...] = ()
    slowest_links: tuple[SlowLink, ...] = ()
    differences: tuple[CheckFinding, ...] = ()
    """Properties in which a node differs from the majority."""

    def list_nodes(self, state: NodeState) -> list[CheckedNode]:
        """The nodes in one state."""
        return [each for each in self.nodes if each.state == state]

    @property
    def headline(self) -> str:
        """The number of nodes in each state."""
        counts = Counter(each.state for each in self.nodes)
        shown = ", ".join(f"{counts[state]} {state}" for state in reversed(STATES) if counts[state])
        return f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}: {shown or 'none'}"


def write_cluster_check(check: ClusterCheck, results: Mapping[str, NodeCheckResult], folder: CheckFolder) -> None:
    """Write the summary as JSON, Markdown and HTML, and the findings of all nodes as the report of one preflight.

    Raises:
        PrimusError: A file cannot be written.
    """
    if results:
        formats.write_report(merge_reports(list(results.values())), folder.directory)
    write_text(folder.directory / "report.md", format_markdown(check))
    write_text(folder.directory / "report.html", format_html(check, results))
    write_json(folder.directory / "cluster.json", check)


def format_text(check: ClusterCheck) -> str:
    """The summary for a terminal: each state with its nodes, then changes, slow links and the headline."""
    parts = []
    for state in STATES:
        nodes = check.list_nodes(state)
        if not nodes:
            continue
        if state == "fit":
            parts.append(f"fit\n  {fold_hosts(each.node for each in nodes)}")
            continue
        rows = [[each.node, "; ".join(each.reasons) or "-"] for each in nodes]
        parts.append(f"{state} ({MEANINGS[state]})\n{table.format_table(('node', 'reason'), rows, indent=2)}")
    for title, header, rows in _list_tables(check):
        parts.append(f"{title}\n{table.format_table(header, rows, indent=2)}")
    return "\n\n".join([*parts, f"{check.headline} ({formats.format_seconds(check.duration_s)})"])


def format_markdown(check: ClusterCheck) -> str:
    """The summary as Markdown."""
    rows = [[each.node, each.state, "; ".join(each.reasons), each.listed] for each in check.nodes]
    parts = [f"# Cluster check {check.id}", check.headline, "## Nodes", format_markdown_table(NODE_HEADER[:4], rows)]
    for title, header, cells in _list_tables(check):
        parts += [f"## {title}", format_markdown_table(header, cells)]
    return "\n\n".join(parts) + "\n"


def _list_tables(check: ClusterCheck) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Title, header and rows of each table behind that of the nodes, without empty ones."""
    found = [
        (f"Changes since {check.previous}", CHANGE_HEADER, list_change_rows(check.changes)),
        ("Slowest links", LINK_HEADER, list_link_rows(check.slowest_links)),
        (
            "Differences between nodes",
            DIFFERENCE_HEADER,
            [[each.host, _format_check(each), each.measured, each.expected] for each in check.differences],
        ),
    ]
    return [each for each in found if each[2]]


def list_change_rows(changes: Sequence[NodeChange]) -> list[list[str]]:
    """Rows below CHANGE_HEADER; equal changes of several nodes share one."""
    nodes: dict[tuple[str, str, str, str], list[str]] = {}
    for each in changes:
        nodes.setdefault((each.kind, each.what, each.before, each.now), []).append(each.node)
    return [[fold_hosts(names), *change] for change, names in nodes.items()]


def list_link_rows(links: Sequence[SlowLink]) -> list[list[str]]:
    """Rows below LINK_HEADER."""
    return [[each.node, each.link, each.measured, f"{each.share:.0%}", str(each.num_nodes)] for each in links]


def _format_check(finding: CheckFinding) -> str:
    return finding.check.partition(".")[2].replace("_", " ")


def format_html(check: ClusterCheck, results: Mapping[str, NodeCheckResult]) -> str:
    """The page."""
    facts: list[list[object]] = [
        ["nodes", page.join_fragments(*_make_counts(check))],
        ["began", f"{table.format_time(check.began)}, took {formats.format_seconds(check.duration_s)}"],
        ["on each node", page.make_element("code", check.command)],
        ["compared with", check.previous or "nothing: it is the first check in this folder"],
    ]
    if not check.is_complete:
        facts.append(["incomplete", "the check was stopped: `nodes check --idle --resume` continues it"])
    if results:
        link = page.make_element("a", "preflight/report.html", href="preflight/report.html")
        facts.append(["all findings", link])
    named = [[page.make_element("span", name, style="white-space: nowrap"), value] for name, value in facts]
    sections: list[tuple[str, object]] = [
        ("", page.make_table(("", ""), named)),
        ("Nodes", _make_nodes(check, results)),
    ]
    tables = {
        title: page.make_table(header, _mark_rows(title, rows), right=(3, 4) if header is LINK_HEADER else ())
        for title, header, rows in _list_tables(check)
    }
    if check.previous and not check.changes:
        sections.append((f"Changes since {check.previous}", page.make_paragraph("none")))
    sections += list(tables.items())
    if not check.slowest_links:
        text = "No link was measured. Add --perf to measure them."
        sections.append(("Slowest links", page.make_paragraph(text)))
    return page.format_page("Cluster check", sections, subtitle=check.id)


def _make_counts(check: ClusterCheck) -> list[page.Html]:
    counts = Counter(each.state for each in check.nodes)
    return [page.make_badge(BADGES[state], f"{counts[state]} {state}") for state in STATES if counts[state]]


def _mark_rows(title: str, rows: Sequence[Sequence[str]]) -> list[list[object]]:
    """Rows with the kind of a change as a badge."""
    if not title.startswith("Changes"):
        return [list(row) for row in rows]
    return [[row[0], page.make_badge(CHANGE_BADGES[row[1]], row[1]), *row[2:]] for row in rows]


def _make_nodes(check: ClusterCheck, results: Mapping[str, NodeCheckResult]) -> page.Html:
    rows = {state: [_make_row(each, results) for each in check.list_nodes(state)] for state in STATES}
    fit = rows.pop("fit")
    urgent = [row for group in rows.values() for row in group]
    if len(fit) <= MOST_FIT:
        return page.make_table(NODE_HEADER, [*urgent, *fit])
    more = page.make_details(f"{len(fit)} fit nodes", page.make_table(NODE_HEADER, fit))
    return page.join_fragments(*([page.make_table(NODE_HEADER, urgent)] if urgent else []), more)


def _make_row(node: CheckedNode, results: Mapping[str, NodeCheckResult]) -> list[object]:
    result = results.get(node.node)
    stack = result.report.stack if result else {}
    number, model = stack.get("GPU count", ""), stack.get("GPU model", "")
    devices = f"{number} x {model}" if model else "CPU" if result else ""
    reasons = page.join_fragments(
        *(page.make_element("div", reason) for reason in node.reasons or (MEANINGS[node.state],))
    )
    driver = stack.get("amd driver") or stack.get("nvidia driver") or ""
    return [
        node.node,
        page.make_badge(BADGES[node.state], node.state),
        reasons,
        node.listed,
        stack.get("kernel", ""),
        driver,
        devices,
    ]

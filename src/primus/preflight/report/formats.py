"""The report of a preflight: Markdown, one HTML file, JSON, and node lists for srun."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.nodes.cluster import ClusterReport, Verdict
from primus.preflight.report.grouping import (
    MOST_NAMES,
    WEIGHT,
    ReportLine,
    Row,
    fold_hosts,
    group_by_hosts,
    group_lines,
)
from primus.report import page, table
from primus.runs.files import write_json, write_text

TITLES = {
    "cluster": "Between nodes",
    "host": "Host",
    "gpu": "GPU",
    "network": "Network",
    "storage": "Storage",
    "software": "Software",
    "performance": "Performance",
}
"""Sections by group of checks, in the order of the report."""

VERDICT_WORDS: dict[Verdict, str] = {"pass": "fit", "unknown": "not known to be fit", "fail": "unfit"}
BADGES: dict[Verdict, str] = {"pass": "ok", "unknown": "unknown", "fail": "fail"}
COLORS: dict[Status, str] = {"ok": "32", "info": "34", "warn": "33", "unknown": "35", "fail": "31"}
"""Terminal color codes (ECMA-48)."""
LONGEST_HOSTS = 40
"""Maximum length of a list of nodes in a table, in characters."""


def write_report(report: ClusterReport, folder: Path) -> Path:
    """Write the whole report into a separate folder below `folder`; returns that folder.

    Raises:
        PrimusError: A file cannot be written.
    """
    target = folder / report.id
    for stale in (target / "nodes").glob("*.json"):  # remains of an older report with the same name
        stale.unlink(missing_ok=True)
    for node in report.nodes:
        write_json(target / "nodes" / f"{node.host}.json", node)
    write_json(target / "report.json", build_json(report))
    write_text(target / "report.md", format_markdown(report))
    write_text(target / "report.html", format_html(report))
    lists: dict[str, Sequence[str]] = {
        "passing_nodes.txt": report.list_hosts("pass"),
        "failing_nodes.txt": report.list_hosts("fail"),
        "unknown_nodes.txt": report.list_hosts("unknown"),
        "expected_nodes.txt": report.expected_nodes,
    }
    for name, hosts in lists.items():
        write_text(target / name, "".join(f"{host}\n" for host in sorted(hosts)))
    return target


def build_json(report: ClusterReport) -> dict[str, object]:
    """The report with its verdicts."""
    verdicts = {host: report.judge_host(host) for host in report.expected_nodes}
    why = {host: list_reasons(report, host) for host in _list_unfit_hosts(report)}
    return {"schema": 1, "verdict": report.overall_verdict, "verdicts": verdicts, "reasons": why, "report": report}


def format_headline(report: ClusterReport) -> str:
    """One sentence: the verdict and the number of nodes with each verdict."""
    general = report.list_general_findings()
    if len(report.expected_nodes) == 1:
        host = report.expected_nodes[0]
        return (
            f"{host} is {VERDICT_WORDS[report.overall_verdict]}: "
            f"{_count_statuses([*report.list_host_findings(host), *general])}"
        )
    counts = [(verdict, len(report.list_hosts(verdict))) for verdict in VERDICT_WORDS]
    shown = ", ".join(f"{number} {VERDICT_WORDS[verdict]}" for verdict, number in counts if number)
    troubles = [finding for finding in general if finding.status not in ("ok", "info")]
    together = f"; together {VERDICT_WORDS[report.overall_verdict]}: {_count_statuses(troubles)}" if troubles else ""
    return f"{len(report.expected_nodes)} nodes: {shown}{together}"


def _count_statuses(findings: Sequence[CheckFinding]) -> str:
    numbers = {status: sum(finding.status == status for finding in findings) for status in ("fail", "unknown", "warn")}
    shown = ", ".join(f"{number} {status}" for status, number in numbers.items() if number)
    return shown or f"{len(findings)} checks passed"


def list_rows(report: ClusterReport, group: str) -> list[Row]:
    """The findings of a group by node, then those that concern all nodes."""
    own = [
        (host, finding)
        for host in report.expected_nodes
        for finding in report.list_host_findings(host)
        if finding.group == group
    ]
    return own + [("all", finding) for finding in report.list_general_findings() if finding.group == group]


def format_text(report: ClusterReport, *, is_colored: bool) -> str:
    """The report for a terminal: a table for each group, sorted by severity, then the verdict."""
    parts = [
        f"{title}\n{_format_text_table(group_lines(rows), len(report.expected_nodes) > 1, is_colored=is_colored)}"
        for group, title in TITLES.items()
        if (rows := list_rows(report, group))
    ]
    if report.ignored:
        parts.append(f"ignored: {', '.join(report.ignored)}")
    return "\n\n".join([*parts, f"{format_headline(report)} ({_format_report_duration(report)})"])


def _format_text_table(shown: Sequence[ReportLine], has_hosts: bool, *, is_colored: bool) -> str:
    cells = [
        [
            line.status,
            *([_format_hosts(line)] if has_hosts else []),
            line.check.partition(".")[2],
            line.subjects,
            _format_comparison(line),
        ]
        for line in shown
    ]
    header = ["status", *(["node"] if has_hosts else []), "check", "of", "found"]
    # A row has several lines on a narrow terminal, such as the one that `srun --unbuffered` gives each task.
    head, *body = (row.replace("\n", "\n  ") for row in table.format_rows(header, cells, indent=2))
    printed = [f"  {head}"]
    for line, row in zip(shown, body, strict=True):
        word = line.status
        painted = f"\x1b[{COLORS[word]}m{word}\x1b[0m" if is_colored else word
        printed.append(f"  {painted}{row[len(word) :]}")
        if line.advice:
            printed += [f"  {'':9}{words}" for words in (line.reason, f"-> {line.advice}") if words]
    return "\n".join(printed)


def _format_hosts(line: ReportLine) -> str:
    """The nodes of a line; all of them if the list is short."""
    if len(line.hosts) <= MOST_NAMES:
        return ", ".join(line.hosts)
    folded = fold_hosts(line.hosts)
    return folded if len(folded) <= LONGEST_HOSTS else f"{line.hosts[0]} .. {line.hosts[-1]} ({len(line.hosts)})"


def _format_comparison(line: ReportLine) -> str:
    is_as_expected = line.status in ("ok", "info") or not line.expected
    return line.measured if is_as_expected else f"{line.measured} (expected {line.expected})"


def _format_report_duration(report: ClusterReport) -> str:
    """Duration of the preflight, or of the checks on the slowest node if that is unknown."""
    longest = report.duration_s or max((node.duration_s for node in report.nodes), default=0.0)
    return format_seconds(longest)


def format_seconds(duration_s: float) -> str:
    """A duration with three significant digits."""
    digits = 0 if duration_s >= 100 else 1 if duration_s >= 10 else 2
    return f"{duration_s:.{digits}f} s"


def _list_header_facts(report: ClusterReport) -> list[tuple[str, str]]:
    """Rows of the report's header."""
    began = min((node.time for node in report.nodes), default=0.0)
    return [
        ("verdict", format_headline(report)),
        ("checks", ", ".join(report.checks)),
        ("nodes", f"{len(report.nodes)} of {len(report.expected_nodes)} reported"),
        ("processes", str(report.world_size)),
        ("began", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))),
        ("took", _format_report_duration(report)),
        ("primus", report.version),
        *([("ignored", ", ".join(report.ignored))] if report.ignored else []),
    ]


NODE_HEADER = ("node", "verdict", "fail", "unknown", "warn", "devices", "kernel", "driver", "took")


def _format_node_cells(report: ClusterReport, host: str) -> list[str]:
    """One row of the table of nodes, without the verdict."""
    node = next((node for node in report.nodes if node.host == host), None)
    found = report.list_host_findings(host)
    counts = [str(sum(finding.status == status for finding in found)) for status in ("fail", "unknown", "warn")]
    if node is None:
        return [host, *counts, "-", "-", "-", "-"]
    stack = node.stack
    devices = f"{stack.get('GPU count', '0')} x {stack['GPU model']}" if "GPU model" in stack else "CPU only"
    driver = stack.get("amd driver") or stack.get("nvidia driver") or "-"
    return [host, *counts, devices, stack.get("kernel", "-"), driver, format_seconds(node.duration_s)]


LINE_HEADER = ("status", "node", "check", "of", "found", "expected", "why", "what to do")


def _format_cells(line: ReportLine) -> list[str]:
    return [_format_hosts(line), line.check, line.subjects, line.measured, line.expected, line.reason, line.advice]


def list_reasons(report: ClusterReport, host: str) -> list[str]:
    """Reasons why a node is not fit, one sentence each."""
    return [
        _format_sentence(line)
        for line in group_lines(_select_unfit_rows(report, [(host, each) for each in report.list_host_findings(host)]))
    ]


def _select_unfit_rows(report: ClusterReport, rows: Iterable[Row]) -> list[Row]:
    """Rows that make a node unfit."""
    counted = ("fail", "unknown", "warn") if report.is_strict else ("fail", "unknown")
    return [(host, finding) for host, finding in rows if finding.status in counted]


def _format_sentence(line: ReportLine) -> str:
    subjects = f" ({line.subjects})" if line.subjects else ""
    return f"{line.check}{subjects}: {line.measured}" + (f", expected {line.expected}" if line.expected else "")


def _list_unfit_hosts(report: ClusterReport) -> list[str]:
    return [host for host in report.expected_nodes if report.judge_host(host) != "pass"]


def _list_causes(report: ClusterReport) -> list[tuple[str, Verdict, list[str]]]:
    """Causes that make nodes unfit, and problems of no particular node: nodes, problem and reason.

    A problem of several nodes is listed once.
    """
    rows = _select_unfit_rows(
        report, [(host, each) for host in _list_unfit_hosts(report) for each in report.list_host_findings(host)]
    )
    causes = [_build_cause(fold_hosts(hosts), found) for hosts, found in group_by_hosts(group_lines(rows)).items()]
    general = group_lines(_select_unfit_rows(report, [("", each) for each in report.list_general_findings()]))
    return [*causes, *([_build_cause("all nodes together", general)] if general else [])]


def _build_cause(who: str, found: Sequence[ReportLine]) -> tuple[str, Verdict, list[str]]:
    worst = min((line.status for line in found), key=WEIGHT.__getitem__)
    return who, "unknown" if worst == "unknown" else "fail", [_format_sentence(line) for line in found]


def format_markdown(report: ClusterReport) -> str:
    """The report as Markdown."""
    parts = [f"# Preflight {report.id}", _format_markdown_table(("", ""), _list_header_facts(report))]
    nodes = [
        [cells[0], VERDICT_WORDS[report.judge_host(host)], *cells[1:]]
        for host in report.expected_nodes
        if (cells := _format_node_cells(report, host))
    ]
    parts += ["## Nodes", _format_markdown_table(NODE_HEADER, nodes)]
    for group, title in TITLES.items():
        if rows := list_rows(report, group):
            shown = [[line.status, *_format_cells(line)] for line in group_lines(rows)]
            parts += [f"## {title}", _format_markdown_table(LINE_HEADER, shown)]
    for who, verdict, why in _list_causes(report):
        parts += [f"## {who}: {VERDICT_WORDS[verdict]}", "\n".join(f"- {_escape_markdown(reason)}" for reason in why)]
    return "\n\n".join(parts) + "\n"


def _format_markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = [header, ["---"] * len(header), *([_escape_markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in shown)


def _escape_markdown(cell: str) -> str:
    return re.sub(r"([|<>*_`\[\]\\])", r"\\\1", cell).replace("\n", " ")


def format_html(report: ClusterReport) -> str:
    """The report as one HTML page."""
    verdicts = {host: page.make_badge(BADGES[report.judge_host(host)]) for host in report.expected_nodes}
    nodes = [
        [cells[0], verdicts[host], *cells[1:]]
        for host in report.expected_nodes
        if (cells := _format_node_cells(report, host))
    ]
    facts: list[list[object]] = [list(row) for row in _list_header_facts(report)]
    facts[0][1] = page.Html(f"{page.make_badge(BADGES[report.overall_verdict])} {page.escape(format_headline(report))}")
    sections: list[tuple[str, object]] = [
        ("", page.make_table(("", ""), facts)),
        ("Nodes", page.make_table(NODE_HEADER, nodes, right=(2, 3, 4, 8))),
    ]
    if causes := _list_causes(report):
        sections.append(("Problems", page.join_fragments(*(_format_html_cause(*cause) for cause in causes))))
    for group, title in TITLES.items():
        if rows := list_rows(report, group):
            sections.append((title, _format_html_lines(group_lines(rows))))
    return page.format_page("Preflight", sections, subtitle=report.id)


def _format_html_cause(who: str, verdict: Verdict, why: Sequence[str]) -> page.Html:
    items = page.join_fragments(*(page.make_element("li", reason) for reason in why))
    title = page.join_fragments(page.make_badge(BADGES[verdict]), " ", who)
    return page.join_fragments(page.make_element("h3", title), page.make_element("ul", items))


def _format_html_lines(shown: Sequence[ReportLine]) -> page.Html:
    """Rows that need attention as a table, and all others in a collapsible element."""
    urgent = [line for line in shown if line.status not in ("ok", "info")]
    calm = [line for line in shown if line.status in ("ok", "info")]
    parts = []
    if urgent:
        parts.append(page.make_table(LINE_HEADER, [_format_html_cells(line) for line in urgent]))
    if calm:
        rows = [_format_html_cells(line)[:-1] for line in calm]
        title = f"{len(calm)} without findings"
        parts.append(page.make_details(title, page.make_table(LINE_HEADER[:-1], rows), is_open=not urgent))
    return page.join_fragments(*parts)


def _format_html_cells(line: ReportLine) -> list[object]:
    host, *others, advice = _format_cells(line)
    shown = page.make_element("span", host, style="white-space: nowrap") if "," not in host else host
    return [page.make_badge(line.status), shown, *others, _mark_commands(advice)]


def _mark_commands(text: str) -> page.Html:
    """HTML text in which words between backticks are marked as code."""
    return page.Html(re.sub("`([^`]+)`", r"<code>\1</code>", page.escape(text)))

"""Nodes are compared, judged and listed; a node that says nothing is never fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from primus.machine.host_list import expand_hosts
from primus.preflight.findings.finding import CheckFinding, NodeReport, Status
from primus.preflight.nodes import cluster
from primus.preflight.nodes.cluster import ClusterReport, Verdict
from primus.preflight.report import formats as report
from primus.preflight.report import grouping

STACK = {"kernel": "6.8.0-51", "amd driver": "6.12.12", "GPU model": "MI300X", "GPU count": "8", "RDMA ports": "8"}


def finding(status: Status, check: str = "host.memlock", **more: object) -> CheckFinding:
    advice = {} if status in ("ok", "info") else {"advice": "`ulimit -l unlimited`"}
    values = {"check": check, "status": status, "measured": "8.0 MiB", "expected": ">= 32 GiB", **advice, **more}
    return CheckFinding(**values)  # type: ignore[arg-type]


def of(host: str, *findings: CheckFinding, **stack: str) -> NodeReport:
    changed = {name.replace("_", " "): value for name, value in stack.items()}
    return NodeReport(host=host, time=1767225600.0, duration_s=1.25, findings=findings, stack=STACK | changed)


def together_of(*nodes: NodeReport, findings: tuple[CheckFinding, ...] = (), **more: object) -> ClusterReport:
    hosts = tuple(sorted({*(node.host for node in nodes), *(one.host for one in findings if one.host)}))
    values = {"id": "20260101_000000-abcd", "version": "1", "checks": ("host", "gpu"), "expected_nodes": hosts, **more}
    return ClusterReport(nodes=nodes, findings=findings, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [("ok", "pass"), ("info", "pass"), ("warn", "pass"), ("unknown", "unknown"), ("fail", "fail")],
)
def test_only_what_was_measured_and_is_good_passes(status: Status, verdict: Verdict) -> None:
    assert together_of(of("a", finding("ok"), finding(status))).overall_verdict == verdict


def test_warnings_count_where_that_was_asked() -> None:
    assert together_of(of("a", finding("warn")), is_strict=True).overall_verdict == "fail"


def test_a_check_that_is_overridden_by_name_does_not_count_and_is_named() -> None:
    judged = together_of(of("a", finding("fail")), ignored=("host.memlock",))
    assert judged.overall_verdict == "pass"
    assert "ignored: host.memlock" in report.format_text(judged, is_colored=False)


def test_a_finding_of_a_node_that_nobody_knows_still_counts() -> None:
    judged = structs.replace(together_of(of("a", finding("ok"))), findings=(finding("fail", host="elsewhere"),))
    assert judged.overall_verdict == "fail"


def test_the_majority_names_the_odd_nodes() -> None:
    nodes = [of("a"), of("b", amd_driver="6.10.5"), of("c", GPU_count="7")]
    found = {one.host: (one.check, one.status) for one in cluster.compare_nodes(nodes, 30.0, {"b": 0.1, "c": 0.2})
             if one.status != "ok"}  # fmt: skip
    assert found == {"b": ("cluster.amd_driver", "warn"), "c": ("cluster.gpu_count", "fail")}


def test_without_a_majority_every_node_is_named() -> None:
    found = list(cluster.compare_nodes([of("a"), of("b", kernel="5.15")], 30.0, {}))
    assert [(one.host, one.measured) for one in found] == [("a", "6.8.0-51"), ("b", "5.15")]


def test_of_two_nodes_the_one_with_fewer_devices_is_named() -> None:
    found = list(cluster.compare_nodes([of("a", RDMA_ports="10"), of("b", RDMA_ports="9")], 30.0, {}))
    assert [(one.host, one.status, one.measured) for one in found] == [("b", "fail", "9")]


def test_a_clock_that_is_far_off_is_a_warning() -> None:
    found = {
        one.host: one.status
        for one in cluster.compare_nodes([of("a"), of("b"), of("c")], 30.0, {"b": -31.0, "c": 29.0})
    }
    assert found == {"b": "warn", "c": "ok"}


def test_the_headline_counts_what_is_wrong_with_no_node_in_particular() -> None:
    broken = finding("fail", "performance.complete")
    one = structs.replace(together_of(of("a", finding("ok"))), findings=(broken,))
    two = structs.replace(together_of(of("a", finding("ok")), of("b", finding("ok"))), findings=(broken,))
    assert report.format_headline(one) == "a is unfit: 1 fail"
    assert report.format_headline(two) == "2 nodes: 2 fit; together unfit: 1 fail"
    assert "## all nodes together: unfit" in report.format_markdown(two)


def test_the_lists_hold_a_host_a_line_and_nothing_of_older_reports(tmp_path: Path) -> None:
    first = report.write_report(together_of(of("c", finding("ok"))), tmp_path)
    nodes = (of("b", finding("fail")), of("a", finding("ok")), of("d", finding("unknown")))
    later = together_of(*nodes, findings=tuple(cluster.report_missing_nodes(["e"], 5)), id="20260101_000001-abcd")
    folder = report.write_report(later, tmp_path)
    assert folder != first
    lists = {name: (folder / f"{name}_nodes.txt").read_text() for name in ("passing", "failing", "unknown", "expected")}
    assert lists == {"passing": "a\n", "failing": "b\ne\n", "unknown": "d\n", "expected": "a\nb\nd\ne\n"}
    assert sorted(path.name for path in (folder / "nodes").iterdir()) == ["a.json", "b.json", "d.json"]
    told = json.loads((folder / "report.json").read_text())
    assert told["verdict"] == "fail"
    assert told["verdicts"] == {"a": "pass", "b": "fail", "d": "unknown", "e": "fail"}


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    judged = together_of(of("a", finding("warn")), of("b", finding("fail", subject="GPU 3"), kernel="5.15"))
    folders = [report.write_report(judged, tmp_path / name) for name in ("one", "two")]
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert files[0] == files[1]
    for path in files[0]:
        assert (folders[0] / path).read_bytes() == (folders[1] / path).read_bytes()


def test_the_worst_comes_first_and_the_verdict_last() -> None:
    shown = report.format_text(together_of(of("a", finding("ok", "host.swap"), finding("fail"))), is_colored=False)
    assert shown.index("memlock") < shown.index("swap")
    assert shown.splitlines()[-1] == "a is unfit: 1 fail (1.25 s)"
    assert "\x1b[" not in shown
    assert "\x1b[31mfail\x1b[0m" in report.format_text(together_of(of("a", finding("fail"))), is_colored=True)


def test_figures_of_many_devices_are_one_row() -> None:
    figures = [
        finding("ok", "gpu.temperature", subject=f"GPU {i}", measured=f"{40 + i} C", value=40.0 + i) for i in range(8)
    ]
    (line,) = grouping.group_lines([("a", figure) for figure in figures])
    assert (line.subjects, line.measured) == ("GPU 0 .. GPU 7 (8)", "40 C .. 47 C, median 43 C")


def many(num_nodes: int) -> ClusterReport:
    """Nodes with the same faults, of which one has another as well."""
    nodes = []
    for node in range(num_nodes):
        busy = [
            finding("fail", "gpu.memory_used", subject=f"GPU {gpu}", measured=f"{3 + gpu} GiB", value=3.0 + gpu)
            for gpu in range(8)
        ]
        own = [finding("fail", "gpu.count", measured="7", expected="8")] if node == 5 else []
        nodes.append(of(f"node{node:02d}", finding("fail"), *busy, finding("unknown", "gpu.tool"), *own))
    return together_of(*nodes)


def test_equal_findings_of_many_nodes_are_said_once() -> None:
    judged = many(16)
    text = report.format_markdown(judged)
    assert text.count("host.memlock") == 2  # in the table of the host, and in what is wrong
    assert text.count("gpu.memory\\_used") == 2
    sections = re.findall(r"^## (.*): (unfit|not known to be fit)$", text, re.MULTILINE)
    assert sections == [("node[00-15]", "unfit"), ("node05", "unfit")]
    assert r"- gpu.memory\_used (GPU 0 .. GPU 7 (8)): 3 GiB .. 10 GiB, median 6 GiB" in text
    assert len(text.splitlines()) < 60
    assert "node[00-15]" in report.format_text(judged, is_colored=False)
    (extra,) = set(report.list_reasons(judged, "node05")) - set(report.list_reasons(judged, "node04"))
    assert extra == "gpu.count: 7, expected 8"


def test_a_fault_of_one_device_is_never_told_of_another_node() -> None:
    rows = [
        ("a", finding("fail", "gpu.pcie_link", subject="GPU 2")),
        ("b", finding("fail", "gpu.pcie_link", subject="GPU 5")),
    ]
    assert [(line.hosts, line.subjects) for line in grouping.group_lines(rows)] == [
        (("a",), "GPU 2"),
        (("b",), "GPU 5"),
    ]
    same = [("a", rows[0][1]), ("b", rows[0][1])]
    assert [(line.hosts, line.subjects) for line in grouping.group_lines(same)] == [(("a", "b"), "GPU 2")]


@given(st.sets(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}(-[a-z])?", fullmatch=True), min_size=1))
def test_a_folded_list_of_nodes_expands_to_the_same_nodes(hosts: set[str]) -> None:
    assert sorted(expand_hosts(grouping.fold_hosts(hosts))) == sorted(hosts)


def test_nodes_are_folded_as_slurm_lists_them() -> None:
    assert grouping.fold_hosts(["n10", "n08", "n09", "n12", "login", "r1n1"]) == "n[08-10,12],r1n1,login"


def test_markdown_keeps_its_tables_whole() -> None:
    text = report.format_markdown(together_of(of("a", finding("fail", measured="a | b <script> *x*"))))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(re.search(r"(?<!\\)\|$", row) for row in rows)
    assert r"a \| b \<script\> \*x\*" in text


def test_a_narrow_terminal_wraps_the_rows_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun --unbuffered gives each task a terminal of 80 columns."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    long = CheckFinding(check="host.cpu", status="ok", measured=" ".join(["word"] * 30))
    lines = report.format_text(together_of(of("a", long, finding("fail"))), is_colored=False).splitlines()
    assert max(map(len, lines)) <= 60 and sum("word word" in line for line in lines) > 1

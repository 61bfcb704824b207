"""The page of a cluster, and its text."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

import browser
from primus.preflight.cluster_check import drift, report, result
from primus.preflight.cluster_check.report import ClusterCheck
from primus.preflight.cluster_check.result import CheckFolder, NodeCheckResult
from primus.preflight.findings.finding import CheckFinding, NodeReport
from primus.preflight.nodes.cluster import Verdict
from primus.runtime import ClusterNode

NUM_NODES = 60


def make_result(number: int, kernel: str = "5.15.0-105-generic", speed: float = 310.0) -> NodeCheckResult:
    name = f"gpu{number:03}"
    stack = {"kernel": kernel, "amd driver": "6.12.12", "GPU count": "8", "GPU model": "MI300X"}
    is_bad = number == 7
    missing = CheckFinding(check="gpu.count", status="fail", measured="7 GPUs", expected="8", advice="reseat it")
    own = NodeReport(host=name, time=0.0, duration_s=12.0, stack=stack, findings=(missing,) * is_bad)
    links = tuple(
        CheckFinding(check=f"performance.{link}", status="info", measured=f"{value:.4g} GB/s", value=value)
        for link, value in (("all_reduce", speed - number / 10), ("host_to_device", 52 + number % 3))
    )
    verdict: Verdict = "fail" if is_bad else "pass"
    reasons = ("gpu.count: 7 GPUs, expected 8 (the device 0000:c1:00.0 does not answer)",) * is_bad
    return NodeCheckResult(node=name, verdict=verdict, reasons=reasons, report=own, findings=links)


@pytest.fixture
def check_folder(tmp_path: Path) -> CheckFolder:
    """A cluster of 60 nodes, of which some are not idle."""
    results = {each.node: each for each in map(make_result, range(NUM_NODES - 5))}
    results |= {"gpu003": make_result(3, kernel="5.15.0-119-generic"), "gpu011": make_result(11, speed=190.0)}
    earlier = {each.node: [each] for each in map(make_result, range(NUM_NODES - 5))}
    nodes = [ClusterNode(name=name, state="idle") for name in results]
    nodes += [
        ClusterNode(name="gpu055", state="drained", reason="Kill task failed | opened ticket <4711>"),
        ClusterNode(name="gpu056", state="down", reason="Not responding"),
        ClusterNode(name="gpu057", state="busy", reason="allocated"),
        ClusterNode(name="gpu058", state="busy", reason="mixed"),
        ClusterNode(name="gpu059", state="idle"),
    ]
    problems = {"gpu059": "srun: error: Unable to allocate resources: Requested nodes are busy"}
    listed = {"gpu055": "2 failures on it (xid_79) (since 2026-01-05 10:00 until 2026-01-12 10:00)"}
    merged = result.merge_reports(list(results.values()))
    check = ClusterCheck(
        id="20260106_080000-beef",
        began=1767686400.0,
        duration_s=132.4,
        command="preflight --no-record-unfit --perf --quick",
        is_complete=True,
        nodes=tuple(result.combine_states(nodes, results, problems, listed)),
        previous="20260105_080000-cafe",
        changes=tuple(drift.find_changes(results, earlier, 5.0)),
        slowest_links=tuple(drift.find_slowest_links(results)),
        differences=tuple(each for each in merged.findings if each.group == "cluster"),
    )
    folder = CheckFolder(tmp_path / check.id)
    report.write_cluster_check(check, results, folder)
    (tmp_path / "text").write_text(report.format_text(check))
    return folder


def test_the_text_says_each_state_with_its_nodes(check_folder: CheckFolder) -> None:
    text = (check_folder.directory.parent / "text").read_text()
    assert "gpu007  gpu.count: 7 GPUs" in text
    assert "gpu059  srun: error: Unable to allocate" in text
    assert "fit\n  gpu[000-006,008-054]" in text
    assert "60 nodes: 54 fit, 2 busy, 1 drained, 1 down, 1 no answer, 1 unfit (132 s)" in text
    assert "gpu003  changed  kernel      5.15.0-105-generic  5.15.0-119-generic" in text
    first = text.partition("Slowest links")[2].splitlines()[2].split()
    assert first[:2] == ["gpu011", "all_reduce"] and "61%" in first


def test_the_json_holds_what_the_page_shows(check_folder: CheckFolder) -> None:
    values = json.loads((check_folder.directory / "cluster.json").read_text())
    assert [each["node"] for each in values["nodes"]][:2] == ["gpu007", "gpu059"]
    assert {(each["node"], each["kind"]) for each in values["changes"]} == {("gpu003", "changed"), ("gpu011", "worse")}
    assert [each["host"] for each in values["differences"]] == ["gpu003"]
    assert (check_folder.directory / "preflight/failing_nodes.txt").read_text() == "gpu007\n"
    assert "| gpu055 | drained" in (check_folder.directory / "report.md").read_text()


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_a_phone_and_a_desk(check_folder: CheckFolder, width: int, tmp_path: Path) -> None:
    text = (check_folder.directory / "report.html").read_text()
    assert "opened ticket &lt;4711&gt;" in text and "54 fit nodes" in text
    frame = f'<iframe id="frame" width="{width}" height="900" srcdoc="{html.escape(text)}"></iframe>'
    measure = "document.title = frame.contentDocument.documentElement.scrollWidth"
    holder = tmp_path / "holder.html"
    holder.write_text(f"<title></title>{frame}<script>onload = () => {{ {measure} }}</script>")
    shown = re.search(r"<title>(\d+)</title>", browser.dom(holder))
    assert shown and int(shown[1]) <= width

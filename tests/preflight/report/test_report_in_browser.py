"""The preflight's page as a real browser shows it."""

from __future__ import annotations

from pathlib import Path

import browser
from primus.preflight.findings.finding import CheckFinding, NodeReport
from primus.preflight.nodes.cluster import ClusterReport
from primus.preflight.report import formats as report

FIT = (
    CheckFinding(check="host.memlock", status="ok", measured="unlimited", expected="unlimited"),
    CheckFinding(check="gpu.count", status="info", measured="8"),
)
UNFIT = (
    CheckFinding(
        check="gpu.pcie_link",
        subject="GPU 3",
        status="fail",
        measured="x8 <16 GT/s>",
        expected="x16 32 GT/s",
        reason="the card's own maximum",
        advice="reseat the card",
    ),
    CheckFinding(
        check="network.rdma_port", subject="mlx5_5 port 1", status="warn", measured="DOWN", advice="check the cable"
    ),
    CheckFinding(check="software.driver", status="unknown", measured="not known", advice="install amd-smi"),
)


def a_report() -> ClusterReport:
    nodes = tuple(
        NodeReport(host=host, node_rank=rank, time=1_700_000_000.0, duration_s=2.5, findings=findings)
        for rank, (host, findings) in enumerate({"node-1": FIT, "node-2": (*FIT, *UNFIT)}.items())
    )
    return ClusterReport(
        id="preflight-1", version="1.0", checks=("host", "gpu"), nodes=nodes, expected_nodes=("node-1", "node-2")
    )


def test_the_page_names_the_unfit_node_its_cause_and_what_to_do(tmp_path: Path) -> None:
    folder = report.write_report(a_report(), tmp_path)
    shown = browser.dom(folder / "report.html")
    for said in ("<title>Preflight", "node-2", "GPU 3", "x8 &lt;16 GT/s&gt;", "reseat the card", "check the cable"):
        assert said in shown
    for status in ("ok", "fail", "warn", "unknown"):
        assert f'class="badge {status}"' in shown


def test_the_page_is_drawn_in_light_and_in_dark(tmp_path: Path) -> None:
    page = report.write_report(a_report(), tmp_path) / "report.html"
    light = browser.screenshot(page, tmp_path / "light.png").read_bytes()
    dark = browser.screenshot(page, tmp_path / "dark.png", is_dark=True).read_bytes()
    assert min(len(light), len(dark)) > 30_000
    assert light != dark

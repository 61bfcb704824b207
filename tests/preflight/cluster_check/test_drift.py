"""What has changed on the nodes of a cluster, and their slowest links."""

from __future__ import annotations

from primus.preflight.cluster_check.drift import find_changes, find_slowest_links
from primus.preflight.cluster_check.result import NodeCheckResult
from primus.preflight.findings.finding import CheckFinding, NodeReport, Status

TOLERANCE = 5.0


def finding(
    check: str, measured: str, *, status: Status = "ok", value: float | None = None, subject: str = ""
) -> CheckFinding:
    return CheckFinding(check=check, subject=subject, status=status, measured=measured, value=value)


def rate(value: float, check: str = "performance.all_reduce") -> CheckFinding:
    return finding(check, f"busbw {value:g} GB/s at 1 GiB", value=value)


def node(*findings: CheckFinding, name: str = "n1", **stack: str) -> NodeCheckResult:
    report = NodeReport(host=name, time=0.0, duration_s=1.0, findings=findings, stack=stack)
    return NodeCheckResult(node=name, verdict="pass", report=report)


def changes(now: NodeCheckResult, *earlier: NodeCheckResult) -> list[tuple[str, str, str, str]]:
    found = find_changes({"n1": now}, {"n1": earlier}, TOLERANCE)
    return [(each.kind, each.what, each.before, each.now) for each in found]


def test_a_changed_driver_firmware_and_kernel_are_named_with_both_values() -> None:
    before = node(kernel="5.15.0-105", driver="6.12.12", OS="Ubuntu 22.04")
    now = node(kernel="5.15.0-119", OS="Ubuntu 22.04", firmware="28.40")
    assert changes(now, before) == [
        ("changed", "kernel", "5.15.0-105", "5.15.0-119"),
        ("changed", "driver", "6.12.12", "none"),
        ("changed", "firmware", "none", "28.40"),
    ]


def test_a_bandwidth_has_changed_only_outside_of_the_range_of_earlier_checks() -> None:
    earlier = [node(rate(310)), node(rate(330)), node(rate(300))]
    assert changes(node(rate(288)), *earlier) == []  # 4 % below the lowest
    assert changes(node(rate(345)), *earlier) == []
    ((kind, what, before, now),) = changes(node(rate(280)), *earlier)
    assert (kind, what) == ("worse", "all_reduce")
    assert ("310" in before, "280" in now) == (True, True)
    assert [each[0] for each in changes(node(rate(350)), *earlier)] == ["better"]


def test_values_that_vary_with_the_hour_are_no_change() -> None:
    warm = finding("gpu.temperature", "61 C", value=61, subject="GPU 0")
    hot = finding("gpu.temperature", "84 C", value=84, subject="GPU 0")
    errors = finding("performance.burn_in", "3 wrong words", value=3)
    assert changes(node(hot, errors), node(warm, finding("performance.burn_in", "0 wrong words", value=1))) == []


def test_new_warnings_come_first_and_one_that_is_gone_is_named() -> None:
    port = finding("network.errors", "12 discards", status="warn", subject="mlx5_3")
    clock = finding("host.clock", "no time service", status="warn")
    found = changes(node(port, finding("host.clock", "chrony")), node(clock))
    assert found == [
        ("worse", "network.errors mlx5_3", "none", "warn: 12 discards"),
        ("better", "host.clock", "warn: no time service", "ok: chrony"),
    ]
    assert changes(node(port), node(port)) == []


def test_a_node_without_an_earlier_check_has_no_changes() -> None:
    assert find_changes({"n1": node(rate(1))}, {}, TOLERANCE) == []


def test_slow_links_are_compared_with_the_same_link_of_other_nodes() -> None:
    results = {
        name: node(rate(speed), rate(100 + number, "performance.pairs"), name=name)
        for number, (name, speed) in enumerate({"n1": 300.0, "n2": 310.0, "n3": 150.0}.items())
    }
    links = find_slowest_links(results)
    assert (links[0].node, links[0].link, links[0].share, links[0].num_nodes) == ("n3", "all_reduce", 0.5, 3)
    assert [(each.node, each.link) for each in links[1:]] == [("n1", "pairs"), ("n1", "all_reduce"), ("n2", "pairs")]
    assert find_slowest_links({"n1": node(finding("host.cpu", "x", value=3.0))}) == []

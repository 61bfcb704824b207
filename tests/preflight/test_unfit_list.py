"""Which nodes of a preflight are recorded in the list of unfit nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.preflight.findings.finding import CheckFinding, NodeReport, Status
from primus.preflight.nodes.cluster import ClusterReport
from primus.preflight.report.unfit_list import record_failing_nodes
from primus.runs.unfit_nodes import read_unfit_nodes
from primus.task import TaskContext


def report(**statuses: Status) -> ClusterReport:
    nodes = [
        NodeReport(
            host=host,
            node_rank=rank,
            time=1.0,
            duration_s=0.1,
            findings=(
                CheckFinding(check="gpu.count", status=status, measured="7", expected="8", advice="Reboot the node."),
            ),
        )
        for rank, (host, status) in enumerate(statuses.items())
    ]
    return ClusterReport(id="p1", version="0", checks=("gpu",), nodes=tuple(nodes), expected_nodes=tuple(statuses))


@pytest.mark.parametrize(
    ("statuses", "recorded"),
    [
        ({"n1": "ok", "n2": "fail", "n3": "warn"}, ["n2"]),
        ({"n1": "fail", "n2": "fail"}, []),  # an option is wrong, or the site
        ({"n1": "fail"}, []),
        ({"n1": "ok", "n2": "unknown"}, []),
        ({"n1": "unknown", "n2": "fail"}, []),
    ],
)
def test_a_node_that_fails_what_others_pass_is_recorded(
    tmp_path: Path, statuses: dict[str, Status], recorded: list[str]
) -> None:
    context = TaskContext(environ={"PRIMUS_UNFIT_NODES": str(tmp_path / "list")})
    record_failing_nodes(report(**statuses), context)
    found = read_unfit_nodes(context.environ).unfit
    assert [each.node for each in found] == recorded
    assert all(each.reason.startswith("preflight: ") and each.records[0].run == "p1" for each in found)


def test_a_node_that_did_not_respond_is_not_recorded(tmp_path: Path) -> None:
    context = TaskContext(environ={"PRIMUS_UNFIT_NODES": str(tmp_path / "list")})
    found = report(n1="ok")
    missing = CheckFinding(check="cluster.missing", status="fail", measured="no response", advice="x", host="n2")
    record_failing_nodes(
        ClusterReport(
            id="p1", version="0", checks=(), nodes=found.nodes, findings=(missing,), expected_nodes=("n1", "n2")
        ),
        context,
    )
    assert read_unfit_nodes(context.environ).nodes == ()


def test_a_list_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list").write_text("")
    context = TaskContext(environ={"PRIMUS_UNFIT_NODES": str(tmp_path / "list")})
    record_failing_nodes(report(n1="ok", n2="fail"), context)
    assert "n2 is not recorded in the list of unfit nodes" in capsys.readouterr().out

"""What a preflight says of the nodes of a measurement that ended early, wherever it was when it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.machine import measurements
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import MachineFacts
from primus.machine.measurements import MeasuredFigure, RankMeasurements, RankResult
from primus.machine.tree import FileTree
from primus.preflight import run_measurements
from primus.preflight.findings.node import PreflightNode
from primus.preflight.options import Options
from primus.runs.files import write_json
from primus.runs.store import Run, RunOutcome
from primus.task import TaskContext

HOSTS = {0: "a", 1: "b", 2: "c"}
FIGURES = (MeasuredFigure(test="sanity", value=8.0, unit="GB free"),)


def hosts_in_doubt(folder: Path, *parts: RankResult, tests: str = "sanity") -> set[str]:
    """Hosts of which something is unknown or bad after three nodes of one rank each left these parts."""
    for part in parts:
        write_json(folder / measurements.find_measurements_file(part.rank), RankMeasurements(rank=part))
    node = PreflightNode(facts=MachineFacts(), tree=FileTree(), environ={}, layout=ClusterLayout(nnodes=3, nproc=1))
    outcome = RunOutcome(state="failed", exit_code=1)
    context = TaskContext(environ={}, launch=lambda: (Run(folder), outcome))
    found = run_measurements.run_measurements(node, HOSTS, Options(tests=tests), context).findings
    return {finding.host for finding in found if finding.host and finding.status in ("unknown", "fail")}


def rank(number: int, **more: object) -> RankResult:
    """As a rank has itself before it met the others: on a node that it takes for the first."""
    values = {"rank": number, "local_rank": 0, "node": 0, "host": "localhost", "device": "cpu", "device_name": "CPU"}
    return RankResult(**(values | more))  # type: ignore[arg-type]


def test_a_rank_that_never_met_the_others_puts_its_own_node_in_doubt(tmp_path: Path) -> None:
    complete = {"figures": FIGURES, "is_complete": True}
    early = rank(2, problem="the meeting of the ranks: connection closed")
    assert hosts_in_doubt(tmp_path, rank(0, **complete), rank(1, node=1, **complete), early) == {"c"}


@pytest.mark.parametrize("problem", ["", "all_reduce of 8 B among 3 ranks: connection closed"])
def test_a_node_that_lacks_only_what_it_measures_with_others_is_not_known_to_be_healthy(
    tmp_path: Path, problem: str
) -> None:
    parts = [rank(number, node=number, figures=FIGURES, problem=problem) for number in range(3)]
    assert hosts_in_doubt(tmp_path, *parts, tests="sanity,collectives") == {"a", "b", "c"}

"""Which failures of attempts are recorded in the list of unfit nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from primus.diagnosis.diagnose import Diagnosis
from primus.diagnosis.finding import Cause, Evidence
from primus.diagnosis.signature_files import get_signature_table
from primus.launch.supervision import node_failures
from primus.launch.supervision.node_failures import NOT_HARDWARE, record_node_failure
from primus.launch.supervision.restart_policy import AttemptResult
from primus.runs.store import Run
from primus.runs.unfit_nodes import UnfitNode, read_unfit_nodes

LINE = "[ 812.5] NVRM: Xid (PCI:0000:4c:00): 79, GPU has fallen off the bus."
FAILED = AttemptResult(attempt=0, kind="failed", action="exclude", hosts=("n2",), reason="rank 1 failed")
HANG = AttemptResult(attempt=0, kind="hang", hosts=("n2",), reason="rank 1 hangs in step 7")


def find(signature: str = "gpu-lost", host: str | None = "n2", action: str = "exclude") -> Diagnosis:
    evidence = Evidence(file="logs/attempt_0/rank_1.log", line=13, text=LINE, rank=1, host=host)
    cause = Cause(
        signature=signature, summary="a GPU fell off", role="root", action="exclude", fix="", evidence=(evidence,)
    )
    return Diagnosis(causes=(cause,), first_rank=1, first_host=host, action=action)  # type: ignore[arg-type]


class Recorder:
    """The list of a user, and what is printed."""

    def __init__(self, folder: Path) -> None:
        self.environ = {"PRIMUS_UNFIT_NODES": str(folder / "list")}
        self.said: list[str] = []

    def record(
        self, result: AttemptResult, diagnosis: Diagnosis, run: str = "/runs/a", *, is_alone: bool = False
    ) -> tuple[UnfitNode, ...]:
        record_node_failure(Run(Path(run)), result, diagnosis, self.environ, self.said.append, is_alone=is_alone)
        return read_unfit_nodes(self.environ).nodes


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def test_a_second_failure_of_the_hardware_makes_the_node_unfit(recorder: Recorder) -> None:
    (first,) = recorder.record(FAILED, find())
    assert (first.node, first.is_unfit) == ("n2", False)
    assert first.records[0].line == f"logs/attempt_0/rank_1.log:13: {LINE}"
    assert recorder.said == ["recorded a failure of n2 (gpu-lost); after a second one, jobs avoid it"]
    (second,) = recorder.record(FAILED, find("gpu-uncorrectable-ecc"), "/runs/b")
    assert second.is_unfit
    assert second.reason == "2 failures on it (gpu-lost, gpu-uncorrectable-ecc)"
    assert "n2 is unfit: 2 failures on it" in recorder.said[-1]


def test_a_lost_node_is_recorded_only_for_a_cause_that_is_its_own(recorder: Recorder) -> None:
    lost = AttemptResult(attempt=0, kind="lost node", hosts=("n2",), reason="its launcher has died")
    assert recorder.record(lost, Diagnosis()) == ()
    assert recorder.record(lost, find(host="n1")) == ()
    assert [each.node for each in recorder.record(lost, find(host="n2.cluster"))] == ["n2"]


def test_a_hang_counts_where_other_nodes_make_progress_and_the_logs_do_not_tell_why(recorder: Recorder) -> None:
    assert recorder.record(HANG, Diagnosis(), is_alone=True) == ()
    software = structs.replace(find("uncaught-exception"), action="retry")
    assert recorder.record(HANG, software) == ()
    (node,) = recorder.record(HANG, Diagnosis())
    assert node.records[0].signature == node_failures.HANG


@pytest.mark.parametrize(
    ("result", "diagnosis"),
    [
        (structs.replace(FAILED, action="retry"), find(action="retry")),  # the line blames another node
        (structs.replace(FAILED, action="stop"), find("gpu-out-of-memory", action="stop")),
        (FAILED, find("slurm-credential")),
        (structs.replace(FAILED, kind="interrupted"), find()),
        (structs.replace(FAILED, hosts=()), find()),
    ],
)
def test_other_failures_are_not_recorded(recorder: Recorder, result: AttemptResult, diagnosis: Diagnosis) -> None:
    assert recorder.record(result, diagnosis) == ()
    assert recorder.said == []


def test_a_list_that_cannot_be_written_is_reported_and_stops_nothing(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("")
    recorder.record(FAILED, find())
    assert "the failure of n2 is not recorded in the list of unfit nodes" in recorder.said[0]


def test_causes_that_are_not_of_the_hardware_are_known_signatures_that_exclude_a_node() -> None:
    table = get_signature_table().by_name
    assert {name for name in NOT_HARDWARE if table[name].action != "exclude"} == set()

"""The folder of a check of a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from primus.errors import PrimusError
from primus.preflight.cluster_check.result import (
    CheckFolder,
    PreflightAnswer,
    build_check_result,
    combine_states,
    find_check_folders,
    merge_reports,
    read_answer,
    read_earlier_results,
)
from primus.preflight.findings.finding import CheckFinding, NodeReport
from primus.preflight.nodes.cluster import ClusterReport
from primus.runtime import ClusterNode


def make_answer(kernel: str = "6.1", verdict: str = "pass") -> PreflightAnswer:
    report = NodeReport(host="pod-7", time=1.0, duration_s=2.0, stack={"kernel": kernel})
    slow = CheckFinding(check="performance.pairs", status="fail", measured="3 GB/s", host="pod-7")
    made = ClusterReport(id="x", version="1", checks=("host",), nodes=(report,), findings=(slow,))
    values = {"verdict": verdict, "reasons": {"pod-7": ["slow"]}, "report": msgspec.to_builtins(made)}
    return msgspec.convert(values, type=PreflightAnswer)


@pytest.mark.parametrize("around", ["{}", "hook: {x}\n{}", "{}\nsrun: task 0: Exited", "warning\n{{not json\n{}\nend"])
def test_the_answer_is_found_among_other_lines(around: str) -> None:
    text = json.dumps(msgspec.to_builtins(make_answer()), indent=2)
    pre, _, post = around.replace("{{", "{").partition("{}")
    assert read_answer(pre + text + post, PreflightAnswer) == make_answer()


@pytest.mark.parametrize("text", ["", "Killed\n", '{"verdict": "pass"'])
def test_an_output_without_an_answer_is_no_verdict(text: str) -> None:
    with pytest.raises(PrimusError, match="no verdict"):
        read_answer(text, PreflightAnswer)


def test_a_result_has_the_name_that_the_scheduler_knows() -> None:
    result = build_check_result("n3", make_answer())
    assert (result.node, result.report.host, result.findings[0].host) == ("n3", "n3", "")
    assert result.reasons == ("slow",)


def test_results_are_read_again_and_a_damaged_one_counts_as_none(tmp_path: Path) -> None:
    folder = CheckFolder(tmp_path / "20260101_000000-aaaa")
    folder.write_command("preflight")
    assert folder.read_command() == "preflight"
    folder.write_result(build_check_result("n1", make_answer()))
    folder.write_result(build_check_result("n2:22", make_answer()))
    (folder.directory / "nodes/n3.json").write_text('{"node": "n3", ')
    assert set(folder.read_results()) == {"n1", "n2:22"}
    later = CheckFolder(tmp_path / "20260102_000000-aaaa")
    later.write_command("preflight")
    later.write_result(build_check_result("n1", make_answer("6.2")))
    assert [each.id for each in find_check_folders(tmp_path)] == [folder.id, later.id]
    assert set(read_earlier_results(tmp_path, later)) == {"n1", "n2:22"}
    assert find_check_folders(tmp_path / "nothing") == []


def test_each_node_has_one_state() -> None:
    nodes = [
        ClusterNode(name="n1", state="idle"),
        ClusterNode(name="n2", state="busy", reason="allocated"),
        ClusterNode(name="n3", state="idle"),
        ClusterNode(name="n4", state="idle"),
        ClusterNode(name="n5", state="drained", reason="bad fan"),
        ClusterNode(name="n6", state="busy"),  # since its result was written
    ]
    results = {name: build_check_result(name, make_answer(verdict=verdict)) for name, verdict in
               (("n1", "fail"), ("n6", "pass"))}  # fmt: skip
    found = combine_states(nodes, results, {"n3": "not scheduled"}, {"n5": "GPU 5"})
    assert [(each.node, each.state, each.reasons, each.listed) for each in found] == [
        ("n1", "unfit", ("slow",), ""),
        ("n3", "no answer", ("not scheduled",), ""),
        ("n4", "not checked", (), ""),
        ("n5", "drained", ("bad fan",), "GPU 5"),
        ("n2", "busy", ("allocated",), ""),
        ("n6", "fit", ("slow",), ""),
    ]


def test_a_node_that_differs_from_the_others_is_named() -> None:
    kernels = {"n1": "6.1", "n2": "6.1", "n3": "5.15"}
    merged = merge_reports([build_check_result(name, make_answer(kernel)) for name, kernel in kernels.items()])
    (different,) = [each for each in merged.findings if each.group == "cluster"]
    assert (different.host, different.measured, different.status) == ("n3", "5.15", "warn")
    assert merged.judge_host("n1") == "fail"

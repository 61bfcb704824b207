"""Jobs on Kubernetes and over ssh avoid unfit nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec import structs

from primus.launch.nodes import avoided_nodes
from primus.launch.nodes.avoided_nodes import AvoidedNodes
from primus.machine import cluster
from primus.plan import LaunchPlan, PlanContext
from primus.runs.store import Run
from primus.runs.unfit_nodes import NodeRecord, UnfitNodes, add_record, read_unfit_nodes
from primus.runtimes import kubernetes, ssh
from primus.runtimes.kubernetes import target
from primus.runtimes.kubernetes.options import parse


@pytest.fixture
def context(tmp_path: Path) -> PlanContext:
    environ = {"PRIMUS_UNFIT_NODES": str(tmp_path / "list")}
    for number, name in enumerate(("n2", "n3")):
        add_record(environ, NodeRecord(node=name, kind="unfit", reason="GPU 5", time=0), now=4e9 + number)

    def find(folder: str | None) -> UnfitNodes:
        return read_unfit_nodes(environ if folder is None else {"PRIMUS_UNFIT_NODES": folder})

    there = ("/x/primus-cli", "direct", "--", "tiny")
    return PlanContext(environ=environ, python="python", directory="/x/out/t/r1", there=there, find_unfit_nodes=find)


def plan_kubernetes(context: PlanContext, *words: str) -> LaunchPlan:
    return kubernetes.wrap(LaunchPlan(argv=("true",)), parse(["create", "--image", "x", *words]), context)


@pytest.mark.parametrize(
    ("words", "avoided", "num_warnings"),
    [
        ((), ["n3", "n2"], 0),
        (("--exclude", "n2"), ["n3"], 0),
        (("--nodelist", "n1,n2,n3,n4", "--replica", "2"), ["n3", "n2"], 0),
        (("--nodelist", "n1,n2,n3", "--replica", "2"), ["n3"], 1),
        (("--nodelist", "n2,n3", "--replica", "2"), [], 2),
    ],
)
def test_a_job_of_kubernetes_avoids_unfit_nodes_while_it_has_enough_others(
    context: PlanContext, words: tuple[str, ...], avoided: list[str], num_warnings: int
) -> None:
    plan = plan_kubernetes(context, *words)
    assert list(plan.avoided) == avoided
    assert sum("may be used although it is unfit" in note for note in plan.notes) == num_warnings


def test_pods_get_the_folder_of_the_list_if_a_volume_holds_it(context: PlanContext) -> None:
    assert "PRIMUS_UNFIT_NODES" not in plan_kubernetes(context, "--volume", "claim:/data").env
    words = ("--unfit-nodes", "/data/unfit", "--volume", "claim:/data")
    assert plan_kubernetes(context, *words).env["PRIMUS_UNFIT_NODES"].value == "/data/unfit"


class Server:
    """A cluster whose nodes can be listed, or not."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def list_nodes(self, place: dict[str, str], environ: dict[str, str]) -> list[target.NodeView]:
        if not self.names:
            raise target.RequestRefused("no right to list nodes", "", 403)
        return [target.NodeView(name=name, is_ready=name != "n9") for name in self.names]


@pytest.mark.parametrize(
    ("nodes", "replica", "avoided"),
    [
        (("n1", "n2", "n3", "n4"), 2, {"n2", "n3"}),
        (("n1", "n2", "n3", "n4"), 3, {"n3"}),
        (("n1", "n2", "n3", "n9"), 2, {"n3"}),  # n9 is not ready
        (("n1", "n2"), 2, {"n3"}),  # n3 is not there now, and may come back
        ((), 3, {"n2", "n3"}),
    ],
)
def test_the_nodes_of_the_cluster_decide_how_many_a_job_can_do_without(
    context: PlanContext, tmp_path: Path, nodes: tuple[str, ...], replica: int, avoided: set[str]
) -> None:
    from primus.plan import LaunchJob
    from primus.runtime import LaunchRequest, RemoteLaunch

    options = parse(["create", "--image", "x", "--replica", str(replica)])
    remote = RemoteLaunch(
        job=LaunchJob(name="t", workspace="out"),
        request=LaunchRequest(runtimes=(), task="tiny"),
        command=(),
        directory=str(tmp_path),
        plan=plan_kubernetes(context, "--replica", str(replica)),
        context=context,
        needs_folder=False,
        is_json=False,
    )
    said: list[str] = []
    chosen = kubernetes._avoid_unfit_nodes(remote, options, Server(*nodes), {}, Run(tmp_path), said.append)  # type: ignore[arg-type]
    assert set(chosen.plan.avoided) == avoided
    assert len(said) == 2 or not nodes or "n3" not in nodes
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert set(event["avoided"]) == avoided


@pytest.mark.parametrize(
    ("hosts", "spare", "used", "avoided"),
    [
        ("n1,n2,n4", 1, "2", ["n2"]),
        ("n1,n4,n5", 1, "2", []),
        ("n1,n2", 0, "2", []),
        ("n1,n2,n3,n4", 2, "2", ["n3", "n2"]),
        ("n1,n2,n3", 1, "2", ["n3"]),
    ],
)
def test_a_spare_host_takes_the_place_of_an_unfit_one(
    context: PlanContext, hosts: str, spare: int, used: str, avoided: list[str]
) -> None:
    plan = ssh.wrap(LaunchPlan(argv=("true",)), ssh.Options(hosts=(hosts,), spare_nodes=spare), context)
    assert plan.env["NNODES"].value == used
    assert list(plan.avoided) == avoided
    assert plan.env["MASTER_ADDR"].value == "n1"
    is_short = len(hosts.split(",")) - len(set(hosts.split(",")) & {"n2", "n3"}) < int(used)
    assert any("may be used although it is unfit" in note for note in plan.notes) is is_short


def test_a_node_is_named_as_its_scheduler_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cluster.NODE_NAME_VARIABLE, "gpu-node-7")
    assert cluster.find_node_name() == "gpu-node-7"
    monkeypatch.delenv(cluster.NODE_NAME_VARIABLE)
    assert cluster.find_node_name() == os.uname().nodename


def test_unfit_nodes_of_a_running_job_are_said_and_recorded(context: PlanContext, tmp_path: Path) -> None:
    said: list[str] = []
    listed = context.find_unfit_nodes(None)
    assert listed is not None
    avoided_nodes.report_used_nodes(listed, ["n1", "n2.cluster"], Run(tmp_path), said.append)
    assert said == [f"warning: the job runs on n2.cluster, which is unfit: {listed.unfit[0].format_reason()}"]
    assert list(avoided_nodes.read_avoided_nodes(Run(tmp_path)).used) == ["n2.cluster"]
    avoided_nodes.report_avoided_nodes(AvoidedNodes(), Run(tmp_path / "other"), said.append)
    assert not (tmp_path / "other").exists() and len(said) == 1


def test_notes_and_used_nodes_of_two_steps_are_kept() -> None:
    first = AvoidedNodes(avoided={"a": "x"}, used={"b": "y"}, notes=("one",))
    merged = first.merge(structs.replace(first, avoided={}, used={"a": "x"}, notes=("two",)))
    assert merged == AvoidedNodes(avoided={}, used={"a": "x", "b": "y"}, notes=("one", "two"))

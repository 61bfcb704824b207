"""`nodes add`, `nodes list` and `nodes remove`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from fakes import cli
from fakes.slurm import FakeSlurm
from primus.preflight.cluster_check.node_jobs import make_node_job
from primus.runtime import ClusterNode
from primus.runtimes.kubernetes.job_spec import job_name
from primus.runtimes.kubernetes.options import Options


class Operator:
    """Somebody with a list of unfit nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slurm = FakeSlurm(folder / "bin")

    def nodes(self, *words: str, code: int = 0, as_json: bool = False) -> subprocess.CompletedProcess[str]:
        start = ("--json", "direct") if as_json else ("direct",)
        environ = self.slurm.environ | {"PRIMUS_UNFIT_NODES": str(self.folder / "site")}
        done = cli.run(*start, "--", "nodes", *words, cwd=self.folder, **environ)
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    return Operator(tmp_path)


def test_a_node_that_is_added_is_listed_until_it_is_removed(operator: Operator) -> None:
    added = operator.nodes("add", "n3", "n4", "--reason", "GPU 5 loses its link", "--days", "2").stdout
    assert added.startswith("n3 is unfit until 20")
    listed = operator.nodes("list").stdout
    assert "GPU 5 loses its link" in listed and "n4" in listed
    values = json.loads(operator.nodes("list", as_json=True).stdout)
    first = values["nodes"][0]
    assert (first["node"], first["is_unfit"], first["records"][0]["source"]) == ("n3", True, "user")
    assert first["expires"] - first["since"] == pytest.approx(2 * 86400)
    assert operator.nodes("remove", "n3.cluster").stdout == "n3.cluster is not in the list any more\n"
    assert [each["node"] for each in json.loads(operator.nodes("list", as_json=True).stdout)["nodes"]] == ["n4"]
    history = operator.nodes("list", "--all").stdout
    assert "n3: unfit" in history and "n3: fit" in history


def test_a_node_that_is_not_listed_cannot_be_removed(operator: Operator) -> None:
    operator.nodes("add", "n3", "--reason", "GPU 5")
    wrong = operator.nodes("remove", "n3", "n33", code=2).stderr
    assert "'n33' is not in the list of unfit nodes" in wrong and "n3" in wrong
    assert "n3" in operator.nodes("list").stdout, "nothing is removed where a name is wrong"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("add", "n3"), "needs nodes and a reason"),
        (("add", "--reason", "x"), "needs nodes and a reason"),
        (("add", "n3", "../n4", "--reason", "x"), "'../n4' is not the name of a node"),
        (("add", "n3", "--reason", "x", "--days", "-1"), "days"),
        (("remove",), "needs nodes"),
    ],
)
def test_a_mistake_gets_one_message_and_writes_nothing(
    operator: Operator, words: tuple[str, ...], problem: str
) -> None:
    done = operator.nodes(*words, code=2)
    assert problem in done.stderr
    assert "no unfit nodes" in operator.nodes("list").stdout


def test_nodes_are_drained_only_if_asked_and_the_command_is_printed(operator: Operator) -> None:
    operator.nodes("add", "n3", "--reason", "GPU 5")
    assert operator.slurm.calls("scontrol") == []
    said = operator.nodes("add", "n4", "n5", "--reason", "GPU 5", "--drain").stdout
    assert "runs: scontrol update NodeName=n4,n5 State=DRAIN 'Reason=primus: GPU 5'" in said
    assert operator.slurm.argv("scontrol") == ["update", "NodeName=n4,n5", "State=DRAIN", "Reason=primus: GPU 5"]


def test_a_scheduler_that_refuses_to_drain_is_told_and_the_list_holds_the_node(operator: Operator) -> None:
    operator.slurm.answers(scontrol="echo 'slurm_update error: Access denied' >&2; exit 1")
    refused = operator.nodes("add", "n4", "--reason", "GPU 5", "--drain", code=1).stderr
    assert "Access denied" in refused and "ask an operator of Slurm" in refused
    assert "n4" in operator.nodes("list").stdout


def test_nodes_are_cordoned_by_kubectl(operator: Operator) -> None:
    kubectl = operator.slurm.folder / "kubectl"
    kubectl.write_text('#!/bin/sh\necho "$*" >"$FAKE_SLURM/kubectl.calls"\n')
    kubectl.chmod(0o755)
    said = operator.nodes("add", "n4", "--reason", "GPU 5", "--cordon").stdout
    assert "runs: kubectl cordon n4" in said
    assert operator.slurm.calls("kubectl") == ["cordon n4"]


def answer(verdict: str, *reasons: str) -> str:
    """What preflight prints on the node, and its exit code, in bash."""
    values = {"schema": 1, "verdict": verdict, "verdicts": {"n3": verdict}, "reasons": {"n3": reasons}, "report": {}}
    return f"cat <<'END'\n{json.dumps(values)}\nEND\nexit {0 if verdict == 'pass' else 3}"


def test_a_node_that_passes_its_check_is_cleared(operator: Operator) -> None:
    operator.nodes("add", "n3", "n4", "--reason", "GPU 5")
    operator.slurm.answers(srun=answer("pass"))
    said = operator.nodes("check", "n3", "--level", "full").stdout
    assert "n3 is fit, and not in the list any more" in said
    words = operator.slurm.argv("srun")
    assert {"--nodes=1", "--nodelist=n3", "--exclude=n4"} < set(words)
    assert words[-5:] == ["--", "preflight", "--no-record-unfit", "--level", "full"]
    assert [each["node"] for each in json.loads(operator.nodes("list", as_json=True).stdout)["nodes"]] == ["n4"]


def test_a_node_that_fails_its_check_is_recorded_with_the_reasons(operator: Operator) -> None:
    operator.slurm.answers(srun=answer("fail", "GPU 5 is missing.", "A port is down."))
    done = operator.nodes("check", "n3", code=3, as_json=True)
    assert json.loads(done.stdout) == {
        "node": "n3", "verdict": "fail", "reasons": ["GPU 5 is missing.", "A port is down."],
    }  # fmt: skip
    (node,) = json.loads(operator.nodes("list", as_json=True).stdout)["nodes"]
    assert (node["is_unfit"], node["reason"]) == (True, "preflight: GPU 5 is missing.; A port is down.")
    assert node["records"][0]["source"] == "preflight"


def test_a_check_that_says_nothing_changes_nothing(operator: Operator) -> None:
    operator.nodes("add", "n3", "--reason", "GPU 5")
    operator.slurm.answers(srun=answer("unknown", "No right to read the kernel log."))
    assert "could not be checked completely" in operator.nodes("check", "n3", code=3).stdout
    operator.slurm.answers(srun="echo 'srun: error: Unable to allocate resources' >&2; exit 1")
    assert "preflight gave no verdict (exit code 1)" in operator.nodes("check", "n3", code=1).stderr
    (node,) = json.loads(operator.nodes("list", as_json=True).stdout)["nodes"]
    assert node["reason"] == "GPU 5"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("check",), "needs a node"),
        (("check", "n3", "--runtime", "direct"), "--runtime direct does not reach single nodes"),
        (("check", "n3", "--runtime", "slrum"), "--runtime slrum: there is no such runtime"),
        (("check", "n3", "--runtime", "slurm sbatch"), "use slurm srun, not slurm sbatch"),
    ],
)
def test_a_check_without_a_way_to_the_node_is_refused(operator: Operator, words: tuple[str, ...], problem: str) -> None:
    assert problem in operator.nodes(*words, code=2).stderr


SINFO = "printf 'n1|idle|(null)|none\\nn2|idle|(null)|none\\nn3|allocated|(null)|none\\nn4|drained|(null)|fan|2\\n'"
ONE_OF_TWO = "[[ \"$*\" == *nodelist=n1* ]] && exec cat good; echo 'srun: error: Requested nodes are busy' >&2; exit 1"


def test_idle_nodes_are_checked_one_job_each_and_the_others_are_not_touched(operator: Operator) -> None:
    report = {"id": "x", "version": "1", "checks": [], "nodes": [{"host": "n1", "time": 0, "duration_s": 1}]}
    (operator.folder / "good").write_text(json.dumps({"verdict": "pass", "report": report}))
    operator.slurm.answers(sinfo=SINFO, srun=ONE_OF_TWO)
    done = operator.nodes("check", "--idle", "--level", "quick", code=3, as_json=True)
    states = {each["node"]: (each["state"], each["reasons"]) for each in json.loads(done.stdout)["nodes"]}
    assert states == {
        "n1": ("fit", []),
        "n2": ("no answer", ["srun: error: Requested nodes are busy"]),
        "n3": ("busy", ["allocated"]),
        "n4": ("drained", ["fan|2"]),
    }
    calls = operator.slurm.calls("srun")
    assert len(calls) == 2 and all("--immediate=60" in call and "preflight" in call for call in calls)
    (folder,) = (operator.folder / "output/nodes-check").iterdir()
    operator.slurm.forget()
    other = operator.nodes("check", "--idle", "--resume", code=2).stderr
    assert "the last check has run 'preflight --no-record-unfit --level quick'" in other
    operator.nodes("check", "--idle", "--resume", "--level", "quick", code=3)
    assert len(operator.slurm.calls("srun")) == 1, "n1 has a result"
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--node", "n3"), "--idle cannot be combined with a node"),
        (("--resume",), "--resume: there is no check in output/nodes-check"),
    ],
)
def test_a_wrong_request_for_idle_nodes_starts_nothing(
    operator: Operator, words: tuple[str, ...], problem: str
) -> None:
    operator.slurm.answers(sinfo=SINFO)
    assert problem in operator.nodes("check", "--idle", *words, code=2).stderr
    assert operator.slurm.calls("srun") == []
    assert not (operator.folder / "output").exists()


@pytest.mark.parametrize("node", ["n1", "Rack.7", "ip-10-0-123-45.us-west-2.compute.internal", "g" * 21, "g" * 22])
def test_the_job_of_a_node_has_a_name_that_kubernetes_keeps(node: str) -> None:
    job = make_node_job("20260101_000000-beef", ClusterNode(name=node, state="idle"), 60.0, None)
    assert job_name(Options(name=job.name), "preflight", "20260101_000000-beef") == job.name
    other = make_node_job("20260101_000000-beef", ClusterNode(name=f"{node}.b", state="idle"), 60.0, None)
    assert other.name != job.name


def test_a_scheduler_without_nodes_is_an_error(operator: Operator) -> None:
    operator.slurm.answers(sinfo="echo 'sinfo: error: invalid partition' >&2; exit 1")
    done = operator.nodes("check", "--idle", "--runtime", "slurm srun -p gpus", code=1)
    assert "sinfo lists no nodes: sinfo: error: invalid partition" in done.stderr

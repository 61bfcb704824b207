"""`nodes check --idle` on a real Slurm: three nodes are idle, one of them with a fault; one is busy, drained, down."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.test_slurm import Cluster
from fakes import cli

pytestmark = [pytest.mark.cluster("slurm"), pytest.mark.slow]

CHECK = ("direct", "--", "nodes", "check", "--idle")
TASK = ("--storage", "--workspace", "scratch")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = Cluster(tmp_path_factory.mktemp("cluster"))
    place.environ["PRIMUS_UNFIT_NODES"] = str(place.folder / "site")
    try:
        place.script("up", "6")
        (place.folder / "scratch").mkdir()
        mount = ("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place.folder / "scratch"))
        subprocess.run(["nsenter", "--mount", "--target", pid_of(place, "n3"), *mount], check=True, timeout=20)
        assert place.ask("sbatch", "-w", "n4", "--output=/dev/null", "--wrap", "sleep 600").returncode == 0
        update = ("scontrol", "update", "NodeName=n5", "State=DRAIN", "Reason=bad fan | row 3")
        assert place.ask(*update).returncode == 0
        place.script("kill-node", "n6")
        update = ("scontrol", "update", "NodeName=n6", "State=DOWN", "Reason=no power")
        assert place.ask(*update).returncode == 0
        cli.wait_for(lambda: place.ask("squeue", "-h", "-t", "R", "-o", "%N").stdout.split() == ["n4"], "a busy node")
        yield place
    finally:
        place.script("down")


def pid_of(cluster: Cluster, node: str) -> str:
    return (cluster.state / f"slurmd.{node}.pid").read_text().strip()


def read_check(folder: Path) -> Any:
    return json.loads((folder / "cluster.json").read_text())


def list_jobs(cluster: Cluster) -> list[str]:
    return cluster.ask("squeue", "-h", "-o", "%N %j").stdout.split("\n")[:-1]


def test_a_dry_run_names_each_job_and_starts_none(cluster: Cluster) -> None:
    said = cluster.primus("--dry-run", *CHECK, *TASK).stdout
    assert "n3: idle" in said
    assert "n4: busy (allocated)" in said or "n4: busy (mixed)" in said
    assert "n5: drained (bad fan | row 3)" in said and "n6: down (no power)" in said
    (line,) = [line for line in said.splitlines() if "runs: primus-cli slurm srun" in line and "--nodelist=n3" in line]
    for word in ("--nodes=1", "--exclusive", "--immediate=60", "--time=30", "--nice", "-- preflight"):
        assert word in line
    assert len(list_jobs(cluster)) == 1 and not (cluster.folder / "output").exists()


def test_idle_nodes_are_checked_and_the_check_can_be_stopped_and_continued(cluster: Cluster) -> None:
    results = cluster.folder / "output/nodes-check"
    words = (*CHECK, "--parallel", "1", *TASK)
    process = subprocess.Popen(
        [sys.executable, "-m", "primus.cli.main", *words],
        cwd=cluster.folder,
        env=cluster.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    cli.wait_for(lambda: list(results.glob("*/nodes/n1.json")), "the first result")
    cli.wait_for(lambda: any(line.startswith("n2 check-") for line in list_jobs(cluster)), "the second job", 30)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert [line.split()[0] for line in list_jobs(cluster)] == ["n4"], "only the jobs of the check are cancelled"
    (folder,) = results.iterdir()
    stopped = read_check(folder)
    assert not stopped["is_complete"]
    assert {each["node"]: each["state"] for each in stopped["nodes"]} == {
        "n1": "fit", "n2": "not checked", "n3": "not checked", "n4": "busy", "n5": "drained", "n6": "down",
    }  # fmt: skip
    before = (folder / "nodes/n1.json").stat().st_mtime_ns

    said = cluster.primus(*CHECK, "--resume", *TASK, code=3).stdout
    assert "2 of them idle and to be checked" in said
    assert (folder / "nodes/n1.json").stat().st_mtime_ns == before
    check = read_check(folder)
    assert {each["node"]: each["state"] for each in check["nodes"]} == {
        "n1": "fit", "n2": "fit", "n3": "unfit", "n4": "busy", "n5": "drained", "n6": "down",
    }  # fmt: skip
    assert check["is_complete"] and check["nodes"][0]["reasons"][0].startswith("storage.writable (workspace ")
    page = (folder / "report.html").read_text()
    assert "bad fan | row 3" in page and "storage.writable" in page
    assert (folder / "preflight/failing_nodes.txt").read_text() == "n3\n"
    listed = json.loads(cluster.primus("--json", "direct", "--", "nodes", "list").stdout)["nodes"]
    assert [(each["node"], each["is_unfit"], each["records"][0]["run"]) for each in listed] == [
        ("n3", True, folder.name)
    ]


def test_the_next_check_names_what_has_changed(cluster: Cluster) -> None:
    scratch = str(cluster.folder / "scratch")
    subprocess.run(["nsenter", "--mount", "--target", pid_of(cluster, "n3"), "umount", scratch], check=True, timeout=20)
    said = cluster.primus("--json", *CHECK, *TASK).stdout
    check = json.loads(said)
    assert check["previous"] and {each["node"] for each in check["nodes"] if each["state"] == "fit"} == {
        "n1",
        "n2",
        "n3",
    }
    (change,) = [each for each in check["changes"] if each["what"].startswith("storage.writable workspace")]
    assert (change["node"], change["kind"]) == ("n3", "better")
    assert next(each for each in check["nodes"] if each["node"] == "n3")["listed"], "only its own check clears it"

"""Jobs of a real Slurm as their user sees them: why one waits, a restarted controller, a chain, a bare login node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster.test_slurm import LIGHT, Cluster
from fakes import cli
from primus.data.megatron.indexed_dataset import IndexedWriter
from primus.runs import events
from primus.runs.store import Run

pytestmark = [pytest.mark.cluster("slurm"), pytest.mark.slow]

STEPS = 3100
"""At 20 ms each at least 62 s; the warning comes at the latest 60 s after the start of a job of two minutes."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        place.script("up", "2", "0", "gpus")
        yield place
    finally:
        place.script("down")


@pytest.fixture
def occupied(cluster: Cluster) -> Iterator[str]:
    """A job that has all nodes, for at most a minute."""
    words = ("-N", "2", "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 600")
    job = cluster.ask("sbatch", "--parsable", *words).stdout.strip()
    cli.wait_for(lambda: "RUNNING" in cluster.ask("squeue", "-h", "-j", job, "-o", "%T").stdout, "it runs")
    yield job
    cluster.ask("scancel", job)


def test_a_job_that_waits_says_why_and_how_long(cluster: Cluster, occupied: str) -> None:
    running: list[dict[str, object]] = []
    job, _ = cluster.submit("waits", "--gpus-per-node=2", "-t", "2", config="light.yaml")

    def show() -> dict[str, object]:
        state: dict[str, object] = json.loads(cluster.primus("--json", "direct", "--", "jobs", "show", job).stdout)[
            "state"
        ]
        return state

    cli.wait_for(lambda: show()["starts"] is not None, "an estimate", timeout_s=60)
    state = show()
    assert (state["state"], state["reason"], state["num_nodes"], state["gpus"]) == ("queued", "Resources", 2, 4)
    assert str(state["advice"]).startswith("it is next, and waits for nodes to become free")
    listed = cluster.primus("direct", "--", "jobs", "list").stdout
    (line,) = [line for line in listed.splitlines() if line.startswith(job)]
    assert "queued (Resources)" in line and " starts 2" in line
    waited = cluster.primus("direct", "--", "jobs", "wait", job, "--timeout", "1", code=124).stderr
    assert f"job {job} is queued (Resources): it is next" in waited and "expected to start at" in waited
    cluster.ask("scancel", occupied)
    # Of one answer: the job may end before the next one.
    cli.wait_for(lambda: (state := show())["state"] == "running" and running.append(state) is None, "it runs", 60)
    left = running[0]["time_left_s"]
    assert isinstance(left, float | int) and 0 < left <= 120
    cluster.primus("direct", "--", "jobs", "cancel", job)


def test_a_wait_and_a_followed_log_survive_a_controller_that_restarts(cluster: Cluster) -> None:
    job, run = cluster.submit("restarted", config="light.yaml")
    words = [sys.executable, "-m", "primus.cli.main", "direct", "--", "jobs"]
    commands = (["wait", job], ["logs", job, "--follow"])
    started = [
        subprocess.Popen(
            [*words, *each],
            cwd=cluster.folder,
            env=cluster.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in commands
    ]
    cluster.wait_for_step(run, 1, limit_s=120)
    cluster.script("stop-controller")
    try:
        # Both ask at least every 15 s; squeue gives up after ten seconds (slurm.conf(5), MessageTimeout).
        shown = cluster.ask(*words, "show", job, limit_s=60)
        assert shown.returncode == 1 and "squeue does not respond" in shown.stderr
    finally:
        cluster.script("start-controller")
    (out, err), (log, said) = (process.communicate(timeout=120) for process in started)
    assert [process.returncode for process in started] == [0, 0], err + said
    assert out == f"job {job}: done\n"
    lines = [line for line in log.splitlines() if "iteration " in line]
    assert len(lines) == len(set(lines)) == 40, "no line is lost or repeated"
    assert Run(run.directory).read_metadata().outcome.state == "done"


@pytest.mark.timeout(900)
def test_a_long_training_is_one_run_over_several_short_jobs(cluster: Cluster) -> None:
    (cluster.folder / "long.yaml").write_text(LIGHT.replace("save_interval: 10", "save_interval: 100"))
    options = ("--chain", "12", "-t", "2")
    job, run = cluster.submit("long", *options, config="long.yaml", train_iters=STEPS)
    waited = cluster.primus("direct", "--", "jobs", "wait", job, limit_s=900)
    assert waited.stdout.startswith(f"job {job}: done (job ")
    assert [event["step"] for event in events.read_steps(run.events)] == list(range(1, STEPS + 1))
    began = [event["step"] for event in events.read_events(run.events) if event["kind"] == "run_started"]
    assert len(began) > 1 and sorted(began) == began and began[1] > 0, "each job resumes what the one before has saved"
    links = json.loads((run.directory / "submission.json").read_text())["place"]["chain"].split(",")
    assert len(links) == 12
    answer = cluster.ask("squeue", "-h", "--states=all", f"--jobs={','.join(links)}", "-o", "%i|%T|%k").stdout
    shown = {line.split("|")[0]: line.split("|")[1:] for line in answer.splitlines()}
    ended = [shown[link][0] for link in links]
    assert ended == ["COMPLETED"] * len(began) + ["CANCELLED"] * (12 - len(began))
    assert cluster.primus("direct", "--", "jobs", "logs", job).stdout.count("resumes the run") == len(began) - 1
    comment = shown[links[len(began) - 1]][1]
    assert comment.startswith(f"primus:{run.id} step {STEPS}/{STEPS} (100 %), loss "), (
        "the progress, as squeue shows it"
    )
    assert shown[links[-1]][1] == f"primus:{run.id}", "a job that never ran"


@pytest.mark.native
def test_a_login_node_without_torch_and_data_submits_what_the_nodes_have(cluster: Cluster) -> None:
    """torch and the data are where only the nodes mount them; with one path wrong, `jobs wait` says so in a line."""
    bare, mounted, stored = (cluster.folder / name for name in ("bare", "mounted", "stored"))
    for folder in (bare / "torch", mounted, stored, cluster.folder / "empty"):
        folder.mkdir(parents=True)
    (bare / "torch/__init__.py").write_text("raise ImportError('no torch on this login node')\n")
    with IndexedWriter(stored / "here", np.dtype(np.uint16)) as tokens:
        for number in range(20):
            tokens.add_document(np.full(32, number, np.uint16))
        tokens.commit()
    cluster.script("mount", str(stored), str(mounted))
    cluster.script("mount", str(cluster.folder / "empty"), str(bare))
    path = f"{bare}:{cluster.environ['PYTHONPATH']}"
    probe = cluster.ask(sys.executable, "-c", "import torch", PYTHONPATH=path)
    assert "no torch on this login node" in probe.stderr
    options = ("--mock_data", "false", "--train_iters", "2", "--save_interval", "null", "--eval_iters", "0")
    for data, code in (("here", 0), ("wrong", 2)):
        task = ("--", "train", "pretrain", "--config", "tiny.yaml", "--exp_name", f"bare-{data}", *options)
        words = (sys.executable, "-m", "primus.cli.main", "--json", "slurm", "sbatch", "-N", "2", "-c", "2", *task)
        done = cluster.ask(*words, "--train_data_path", f"{mounted}/{data}", limit_s=60, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        assert "checked on the nodes: " in done.stderr and str(mounted) in done.stderr
        job, run = (json.loads(done.stdout)[name] for name in ("id", "run"))
        wait = (sys.executable, "-m", "primus.cli.main", "direct", "--", "jobs", "wait", job, "--timeout", "150")
        waited = cluster.ask(*wait, limit_s=200, PYTHONPATH=path)
        assert waited.returncode == code, waited.stdout + waited.stderr + cluster.logs()
        if code:
            reasons = [line for line in waited.stderr.splitlines() if "no such data" in line]
            assert reasons == [f"primus-cli: run failed: {Run(Path(run)).read_metadata().outcome.reason}"]
            assert f"{mounted}/wrong" in reasons[0]
            assert not list(Path(run).glob("logs/attempt_0/rank_*.log")), "no worker started"

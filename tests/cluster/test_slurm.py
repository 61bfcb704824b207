"""Jobs on a real Slurm of three nodes: started, queued, queued again, restarted without a dead node, cancelled."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from fakes import cli
from primus.comparison.results.result import load_result
from primus.data.megatron.indexed_dataset import IndexedWriter
from primus.runs import events
from primus.runs.store import Run
from primus.runtimes.slurm.options import parse
from primus.runtimes.slurm.script import BatchScript, split_directives

pytestmark = [pytest.mark.cluster("slurm"), pytest.mark.native, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("slurm.sh")
STEPS = 40
EXPERIMENT = """\
workspace: ./output
modules:
  pre_trainer:
    framework: native
    config: pre_trainer.yaml
    model: llama_quickstart.yaml
    overrides: {
      mock_data: true, seq_length: 16, train_iters: STEPS, micro_batch_size: 1, global_batch_size: 2, bf16: false,
      num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, num_query_groups: 2, vocab_size: 64,
      lr: 1.0e-3, min_lr: 1.0e-4, save_interval: 10, auto_continue_train: false,
    }
""".replace("STEPS", str(STEPS))
LONG_S = 180.0
"""For the start of native on two nodes: four processes import torch, on a machine that is busy with other tests."""
LIGHT = EXPERIMENT.replace("framework: native", "framework: bigram")
"""For what does not depend on the engine: it trains without a tensor library, which takes seconds to import."""


class Cluster:
    """A Slurm, and somebody's folder that all of its nodes see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "slurm"
        self.state.mkdir()
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"SLURM_CONF": str(self.state / "slurm.conf"), "XDG_STATE_HOME": str(folder / "state"), "PATH": tools}
        own |= {"PRIMUS_PLUGINS": str(cli.PLUGINS)}
        self.environ = os.environ | own | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        (folder / "tiny.yaml").write_text(EXPERIMENT)
        (folder / "light.yaml").write_text(LIGHT)

    def script(self, *words: str) -> None:
        subprocess.run(["bash", str(SCRIPT), words[0], str(self.state), *words[1:]], check=True, timeout=120)

    def ask(self, *words: str, limit_s: float = 20, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env=self.environ | env, capture_output=True, text=True, timeout=limit_s
        )

    def primus(self, *words: str, code: int = 0, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
        done = self.ask(sys.executable, "-m", "primus.cli.main", *words, limit_s=limit_s)
        assert done.returncode == code, done.stdout + done.stderr + self.logs()
        return done

    def submit(self, name: str, *options: str, config: str = "tiny.yaml", train_iters: int = STEPS) -> tuple[str, Run]:
        """Id and run of a job that trains."""
        task = ("--", "train", "pretrain", "--config", config, "--exp_name", name, "--train_iters", f"{train_iters}")
        values = json.loads(self.primus("--json", "slurm", "sbatch", "-N", "2", "-c", "2", *options, *task).stdout)
        return values["id"], Run(Path(values["run"]))

    def wait_for_step(self, run: Run, step: int, limit_s: float = 60) -> None:
        deadline = time.monotonic() + limit_s
        while not any(event["step"] >= step for event in events.read_steps(run.events)):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        files = [*self.folder.glob("output/*/2*/logs/slurm-*.out"), self.state / "slurmctld.log"]
        return "".join(f"\n== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists())


def pid_of_rank(run: Run, rank: int) -> int:
    pid: int = json.loads((run.attempt_folder(0) / f"rank_{rank}.heartbeat.json").read_text())["pid"]
    return pid


MATRIX = """\
name: rival
experiment: light.yaml
platforms: {cpu: {processes: 1, runtime: slurm sbatch -N 1 -c 1}}
frameworks: [bigram]
models: {tiny: {}}
settings: {train_iters: 12}
repetitions: 2
"""


def losses(run: Run) -> list[float]:
    found = events.read_steps(run.events)
    assert [event["step"] for event in found] == list(range(1, STEPS + 1))
    return [event["loss"] for event in found]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        place.script("up", "3")
        yield place
    finally:
        place.script("down")


def train_by_srun(cluster: Cluster, config: str, name: str) -> list[float]:
    """The losses of a training that nothing happens to."""
    task = ("train", "pretrain", "--config", config, "--exp_name", name)
    cluster.primus("slurm", "srun", "-N", "2", "-c", "2", "--", *task)
    (run,) = (cluster.folder / "output" / name).glob("2*")
    plan = json.loads((run / "plan.json").read_text())
    assert plan["layout"]["nnodes"] == 2
    assert plan["layout"]["sources"]["master_port"] == "$SLURM_JOB_ID"
    assert Run(run).read_metadata().outcome.state == "done"
    return losses(Run(run))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[float]:
    return train_by_srun(cluster, "light.yaml", "plain")


@pytest.mark.parametrize("verb", ["srun", "sbatch --wait"])
def test_a_folder_that_one_node_does_not_have_is_the_reason_of_the_failure(cluster: Cluster, verb: str) -> None:
    hidden, name = cluster.folder / "output" / "hidden", f"hidden-{verb[:4]}"
    hidden.mkdir(parents=True, exist_ok=True)
    (cluster.folder / "empty").mkdir(exist_ok=True)
    space = ["nsenter", "--mount", "--target", (cluster.state / "slurmd.n2.pid").read_text().strip()]
    subprocess.run([*space, "mount", "--bind", str(cluster.folder / "empty"), str(hidden)], check=True)
    try:
        task = ("train", "pretrain", "--config", "light.yaml", "--exp_name", name, "--workspace", "output/hidden")
        done = cluster.primus("slurm", *verb.split(), "-N", "2", "-w", "n1,n2", "--", *task, code=1)
    finally:
        subprocess.run([*space, "umount", str(hidden)], check=True)
    (run,) = (hidden / name).glob("2*")
    outcome = Run(run).read_metadata().outcome
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    assert f"{run}: no such file or folder on n2" in outcome.reason
    assert outcome.reason in done.stdout + done.stderr


def test_a_queued_job_trains_as_one_in_the_foreground(cluster: Cluster, undisturbed: list[float]) -> None:
    job, run = cluster.submit("queued", config="light.yaml")
    assert job in cluster.primus("direct", "--", "jobs", "list").stdout
    followed = cluster.primus("direct", "--", "jobs", "logs", job, "--follow")
    assert f"iteration       {STEPS}/" in followed.stdout
    assert cluster.primus("direct", "--", "jobs", "wait", job).stdout == f"job {job}: done\n"
    shown = json.loads(cluster.primus("--json", "direct", "--", "jobs", "show", "queued").stdout)
    assert (shown["state"]["raw"], shown["state"]["exit_code"], len(shown["state"]["nodes"])) == ("COMPLETED", 0, 2)
    assert f"iteration       {STEPS}/" in cluster.primus("direct", "--", "jobs", "logs", job).stdout
    assert losses(run) == undisturbed


def test_a_job_whose_end_is_announced_saves_and_goes_on_later(cluster: Cluster, undisturbed: list[float]) -> None:
    job, run = cluster.submit("warned", "--requeue", "-t", "30", config="light.yaml")
    cluster.wait_for_step(run, 11)
    assert cluster.ask("scancel", "--batch", "--signal=USR1", job).returncode == 0
    cluster.primus("direct", "--", "jobs", "wait", job, "--timeout", "100")
    shown = json.loads(cluster.primus("--json", "direct", "--", "jobs", "show", job).stdout)
    assert shown["state"]["restarts"] == 1
    began = [event["step"] for event in events.read_events(run.events) if event["kind"] == "run_started"]
    assert len(began) == 2
    assert began[1] >= 11, "it goes on from what it saved when it was told"
    assert losses(run) == undisturbed


@pytest.mark.timeout(600)
def test_a_training_whose_node_dies_goes_on_with_a_spare_one(cluster: Cluster) -> None:
    """Native training, whose ranks wait for the lost one in a collective."""
    job, run = cluster.submit("lost", "--spare-nodes", "1", "--restart-delay", "0", train_iters=3 * STEPS)
    cluster.wait_for_step(run, 25, LONG_S)
    os.kill(pid_of_rank(run, 1), signal.SIGSTOP)  # the training must not end while its node is being killed
    cluster.script("kill-node", "n2")
    try:
        cluster.primus("direct", "--", "jobs", "wait", job, "--timeout", f"{LONG_S:.0f}", limit_s=LONG_S + 30)
        ended = [event for event in events.read_events(run.events) if event["kind"] == "attempt_ended"]
        assert ["n2"] in [event["hosts"] for event in ended]
        shown = json.loads(cluster.primus("--json", "direct", "--", "jobs", "show", job).stdout)
        assert "n3" in shown["state"]["nodes"]
        assert run.read_metadata().attempts == 2
        taken: dict[int, list[float]] = {}
        for event in events.read_events(run.events):
            if event["kind"] == "step":
                taken.setdefault(event["step"], []).append(event["loss"])
        assert sorted(taken) == list(range(1, 3 * STEPS + 1))
        repeated = [values for values in taken.values() if len(values) == 2]
        assert repeated and all(first == second for first, second in repeated)
    finally:
        cluster.script("start-node", "n2")


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster) -> None:
    job, run = cluster.submit("stopped", "--requeue", config="light.yaml")
    cluster.wait_for_step(run, 5)
    cluster.primus("direct", "--", "jobs", "cancel", job)
    waited = cluster.primus("direct", "--", "jobs", "wait", job, "--timeout", "60", code=143)
    assert "run interrupted: SIGTERM; saved at step" in waited.stderr
    assert "interrupted" in [event["kind"] for event in events.read_events(run.events)]
    assert "has ended already: cancelled" in cluster.primus("direct", "--", "jobs", "cancel", job).stdout


def test_benchmarks_run_on_all_nodes_and_node_0_reports(cluster: Cluster) -> None:
    step = ("--json", "slurm", "srun", "-N", "2", "-c", "2", "--")
    sizes = ("--op", "all_reduce", "--sizes", "64K", "--quick", "--per-rank")
    done = cluster.primus(*step, "benchmark", "collectives", *sizes, limit_s=200)
    result = json.loads(done.stdout[done.stdout.index('{\n  "result"') :])["result"]
    assert {rank["host"] for rank in result["ranks"]} == {"n1", "n2"}
    [row] = [row for rank in result["ranks"] for row in rank["rows"]]
    assert row["case"]["ranks"] == 2 and {"rank_0_us", "rank_1_us"} <= set(row["figures"])
    words = ("--config", "light.yaml", "--steps", "8", "--set", "exp_name=measured")
    done = cluster.primus(*step, "benchmark", "train", *words, limit_s=200)
    assert done.stdout.count('"result"') == 1, "one node reports"
    [row] = json.loads(done.stdout[done.stdout.index('{\n  "result"') :])["result"]["ranks"][0]["rows"]
    assert (row["case"]["processes"], row.get("problem", "")) == (2, "")
    [run] = (cluster.folder / "output/measured").glob("2*")
    assert [event["step"] for event in events.read_steps(Run(run).events)] == list(range(1, 9))


def test_data_that_only_the_nodes_have_stop_no_submission(cluster: Cluster) -> None:
    """The user's machine sees an empty folder where the nodes mount the data."""
    stored, mounted = cluster.folder / "stored", cluster.folder / "mounted"
    mounted.mkdir()
    stored.mkdir()
    with IndexedWriter(stored / "here", np.dtype(np.uint16)) as tokens:
        for number in range(20):
            tokens.add_document(np.full(32, number, np.uint16))
        tokens.commit()
    cluster.script("mount", str(stored), str(mounted))
    options = ("--mock_data", "false", "--train_iters", "2", "--save_interval", "null", "--eval_iters", "0")
    for data, code in (("here", 0), ("nowhere", 2)):
        name = f"far-{data}"
        task = ("--", "train", "pretrain", "--config", "tiny.yaml", "--exp_name", name, *options)
        submitted = cluster.primus(
            "--json", "slurm", "sbatch", "-N", "2", "-c", "2", *task, "--train_data_path", f"{mounted}/{data}"
        )
        assert "checked on the nodes: " in submitted.stderr
        values = json.loads(submitted.stdout)
        waited = cluster.primus("direct", "--", "jobs", "wait", values["id"], "--timeout", "100", code=code)
        outcome = Run(Path(values["run"])).read_metadata().outcome
        assert outcome.exit_code == code
        if code:
            assert f"no such data: {mounted}/nowhere.idx" in outcome.reason and outcome.reason in waited.stderr
            assert not list(Path(values["run"]).glob("logs/attempt_0/rank_*.log")), "no worker started"


def test_slurm_says_whether_a_job_could_start(cluster: Cluster) -> None:
    task = ("--", "train", "pretrain", "--config", "tiny.yaml", "--exp_name", "asked")
    assert "to start at" in cluster.primus("slurm", "sbatch", "-N", "2", "--test-only", *task).stderr
    refused = cluster.primus("slurm", "sbatch", "-N", "9", "--test-only", *task, code=1)
    assert "allocation failure" in refused.stderr
    assert not (cluster.folder / "output" / "asked").exists()


def test_a_job_may_be_submitted_from_inside_a_job(cluster: Cluster) -> None:
    """Slurm refuses it with the memory options of both."""
    inner = (sys.executable, "-m", "primus.cli.main", "slurm", "sbatch", "--mem=20", "--wait", "--", "runs", "list")
    done = cluster.ask("srun", "-N", "1", "-n", "1", "--mem-per-cpu=10", *inner, limit_s=90)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
    assert "is done" in done.stdout


HOSTILE = [
    "a b", "it's", 'q"q', "$(id)", "`id`", "a#b", "# b", "back\\slash", "x,y=z", "\u00e9 \u2603", " lead", "trail ",
    "a'\"b", "--x", "a;b&c|d<e>f(g)h", "*?[a]{b,c}~!^", "\\", '"', "%j", "two\nlines", "tab\there", "x" * 1010,
]  # fmt: skip


def test_sbatch_reads_each_value_as_it_was_typed(cluster: Cluster) -> None:
    for value in HOSTILE:
        typed = parse(["sbatch", "--hold", "--comment", value, "-J", "held", "-o", "/dev/null"])
        batch = BatchScript(options=typed, run="/r/x", name="n", command=("true",), primus="true")
        lines, others = split_directives(batch)
        (cluster.folder / "held.sh").write_text("\n".join(["#!/bin/bash", *lines, "true"]) + "\n")
        job = cluster.ask("sbatch", "--parsable", *others, "held.sh").stdout.strip()
        assert cluster.ask("squeue", "--noheader", f"--jobs={job}", "--format=%k|%j").stdout == f"{value}|held\n"
        cluster.ask("scancel", job)


def test_a_comparison_runs_each_cell_as_a_job(cluster: Cluster) -> None:
    (cluster.folder / "jobs.yaml").write_text(
        "experiment: light.yaml\nplatforms: {cpu: {processes: 1, runtime: slurm sbatch -N 1 -c 2}}\n"
        "frameworks: [bigram]\nmodels: {tiny: {settings: {train_iters: 6}}}\nrepetitions: 2\n"
    )
    task = ("direct", "--", "compare", "run", "--matrix", "jobs.yaml", "--json")
    cells = json.loads(cluster.primus(*task, limit_s=240).stdout)["cells"]
    assert [cell["state"] for cell in cells] == ["done", "done"]
    folder = cluster.folder / "output/jobs"
    jobs = {json.loads((folder / cell["run"] / "submission.json").read_text())["id"] for cell in cells}
    assert len(jobs) == 2, "a job for each cell"
    result = json.loads((folder / "results" / f"{cells[0]['cell']}.json").read_text())
    assert result["steps"]["number"] == [1, 2, 3, 4, 5, 6] and len(set(result["inputs"]["tokens"])) == 6
    again = json.loads(cluster.primus(*task).stdout)["cells"]
    assert [cell["run"] for cell in again] == [cell["run"] for cell in cells], "nothing runs twice"


def test_cells_of_a_comparison_are_jobs_that_the_next_command_waits_for(cluster: Cluster) -> None:
    (cluster.folder / "rival.yaml").write_text(MATRIX)
    words = ("--json", "direct", "--", "compare", "run", "--matrix", "rival.yaml")
    command = [sys.executable, "-m", "primus.cli.main", *words]
    harness = subprocess.Popen(command, cwd=cluster.folder, env=cluster.environ, stdout=subprocess.DEVNULL)
    try:
        jobs = cluster.folder / "output/rival/runs"
        cli.wait_for(lambda: len(list(jobs.glob("*/2*/submission.json"))) == 2, "two submissions", timeout_s=120)
    finally:
        harness.kill()
        harness.wait()
    summary = json.loads(cluster.primus(*words, limit_s=240).stdout)
    assert {cell["state"] for cell in summary["cells"]} == {"done"} and len(summary["cells"]) == 2
    assert len(list(jobs.glob("*/2*"))) == 2, "no job is submitted twice"
    results = [load_result(path) for path in sorted((cluster.folder / "output/rival/results").glob("*.json"))]
    assert [len(each.steps.number) for each in results] == [12, 12]


@pytest.mark.parametrize(("options", "code"), [(("-p", "nope"), 1), (("-t", "soon"), 2), (("-N", "some"), 2)])
def test_a_step_that_slurm_rejects_leaves_no_run(cluster: Cluster, options: tuple[str, str], code: int) -> None:
    task = ("--", "train", "pretrain", "--config", "light.yaml", "--exp_name", "rejected")
    cluster.primus("slurm", "srun", *options, *task, code=code)
    assert not (cluster.folder / "output" / "rejected").exists()


XID = "[  812.5] NVRM: Xid (PCI:0000:4c:00): 79, pid=4242, name=python, GPU has fallen off the bus."


def find_workers(run: Run) -> list[psutil.Process]:
    """The workers of a run on the nodes, which are namespaces of this machine."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            found += [process] if "primus.worker" in words and str(run.directory) in words else []
    return found


def test_a_node_whose_planted_gpu_error_repeats_is_avoided_by_the_third_job(cluster: Cluster) -> None:
    for number in (1, 2):
        job, run = cluster.submit(f"xid-{number}", "--exclude", "n3", config="light.yaml")
        cluster.wait_for_step(run, 3)
        with suspended(find_workers(run)):  # no step follows the error
            with (run.directory / "logs/attempt_0/rank_1.log").open("a") as log:
                log.write(f"{XID}\n")
            cluster.script("kill-node", "n2")
        try:
            cluster.primus("direct", "--", "jobs", "wait", job, "--timeout", "100", code=1)
        finally:
            cluster.script("start-node", "n2")
        cli.wait_for(lambda: cluster.ask("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "3", "3 idle nodes")
        listed = json.loads(cluster.primus("--json", "direct", "--", "nodes", "list").stdout)["nodes"]
        assert [(each["node"], each["is_unfit"]) for each in listed] == [("n2", number == 2)], cluster.logs()
        assert listed[0]["records"][-1]["run"] == str(run.directory)
        assert "Xid" in listed[0]["records"][-1]["line"]
    shown = cluster.primus(
        "--dry-run", "slurm", "sbatch", "-N", "2", "--", "train", "pretrain", "--config", "light.yaml"
    )
    assert "--exclude=n2" in shown.stdout
    task = ("--", "train", "pretrain", "--config", "light.yaml", "--exp_name", "third")
    submitted = cluster.primus("--json", "slurm", "sbatch", "-N", "2", "-c", "2", *task)
    assert "avoids n2, which is unfit: 2 failures on it" in submitted.stderr
    values = json.loads(submitted.stdout)
    cluster.primus("direct", "--", "jobs", "wait", values["id"], "--timeout", "100")
    job = json.loads(cluster.primus("--json", "direct", "--", "jobs", "show", values["id"]).stdout)
    assert job["state"]["nodes"] == ["n1", "n3"]
    text = cluster.primus("direct", "--", "runs", "show", values["run"]).stdout
    assert "avoided nodes: n2: 2 failures on it" in text
    # Three nodes cannot be had without it: the list does not stop the job, and that is said.
    words = (*task[:-1], "whole", "--global_batch_size", "3")
    whole = cluster.primus("slurm", "srun", "-N", "3", "-c", "2", *words)
    assert "warning: n2 may be used although it is unfit" in whole.stderr + whole.stdout
    cluster.primus("direct", "--", "nodes", "remove", "n2")
    # Slurm rejects the name of a node that it does not have.
    cluster.primus("direct", "--", "nodes", "add", "n9", "--reason", "a node of another cluster")
    cluster.primus("slurm", "sbatch", "-N", "1", "--wait", *task[:-1], "unknown")


def test_an_unfit_node_of_an_allocation_gives_its_place_to_a_spare_one(cluster: Cluster) -> None:
    job, run = cluster.submit("late", "--spare-nodes", "1", "--hold", config="light.yaml")
    cluster.primus("direct", "--", "nodes", "add", "n2", "--reason", "GPU 5")
    try:
        assert cluster.ask("scontrol", "release", job).returncode == 0
        cluster.primus("direct", "--", "jobs", "wait", job, "--timeout", "100")
        log = cluster.primus("direct", "--", "jobs", "logs", job).stdout
        assert "starts a step on 2 nodes without n2" in log
        assert "avoids n2, which is unfit: GPU 5" in log
        recorded = [event for event in events.read_events(run.events) if event["kind"] == "unfit_nodes"]
        assert list(recorded[-1]["avoided"]) == ["n2"]
    finally:
        cluster.primus("direct", "--", "nodes", "remove", "n2")


def test_a_node_that_becomes_unfit_while_a_job_runs_on_it_is_left_at_the_next_restart(cluster: Cluster) -> None:
    """The list stops no job that runs; a spare node takes over when the job starts its workers again."""
    options = ("--spare-nodes", "1", "--max-restarts", "2", "--restart-delay", "0")
    job, run = cluster.submit("leaves", *options, config="light.yaml", train_iters=1_000_000)
    cluster.wait_for_step(run, 3, LONG_S)
    cluster.primus("direct", "--", "nodes", "add", "n2", "--reason", "GPU 5")
    try:
        cluster.wait_for_step(run, 1 + max(event["step"] for event in events.read_steps(run.events)), LONG_S)
        (worker,) = [each for each in find_workers(run) if each.environ()["RANK"] == "1"]
        assert worker.environ()["SLURMD_NODENAME"] == "n2"
        worker.kill()  # which does not speak against the node
        cli.wait_for(lambda: run.read_metadata().attempts == 2, "the workers start again", LONG_S)
        log = cluster.primus("direct", "--", "jobs", "logs", job).stdout
        assert "avoids n2, which is unfit: GPU 5" in log, log[-2500:]
        assert "starts a step on 2 nodes without n2" in log
    finally:
        cluster.primus("direct", "--", "jobs", "cancel", job)
        cluster.primus("direct", "--", "nodes", "remove", "n2")


@contextlib.contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop processes for a while."""
    for process in processes:
        process.suspend()
    yield
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def test_a_launcher_that_is_killed_leaves_a_job_that_restarts(cluster: Cluster) -> None:
    """srun ends the step by SIGTERM to the other launcher, and nobody has asked the job to stop."""
    job, run = cluster.submit("beheaded", "--max-restarts", "2", "--restart-delay", "0", config="light.yaml")
    cluster.wait_for_step(run, 3)
    (launcher,) = [each for each in find_launchers(run) if each.environ().get("SLURM_NODEID") == "1"]
    launcher.kill()
    cluster.primus("direct", "--", "jobs", "wait", job, "--timeout", "100")
    ended = [event for event in events.read_events(run.events) if event["kind"] == "attempt_ended"]
    assert (ended[0]["end"], ended[-1]["end"]) == ("lost node", "done"), cluster.logs()
    assert "its launcher has died" in ended[0]["reason"]
    assert run.read_metadata().outcome.state == "done"


def find_launchers(run: Run) -> list[psutil.Process]:
    """The launchers of a run on the nodes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_launcher = {"--run", str(run.directory)} < set(words) and "srun" not in words
            found += [process] if is_launcher and "python" in words[0] else []
    return found

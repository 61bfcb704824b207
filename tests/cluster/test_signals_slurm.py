"""Ctrl-C, SIGTERM and hooks on a real Slurm of three nodes, typed in a real terminal: as the documentation says."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.test_slurm import LIGHT, LONG_S, STEPS, Cluster, pid_of_rank
from fakes import cli, terminal
from fakes.terminal import CTRL_C
from primus.launch.signals import INSISTS_AFTER_S
from primus.runs import events
from primus.runs.store import Run

pytestmark = [pytest.mark.cluster("slurm"), pytest.mark.native, pytest.mark.slow]

FOREVER = 1_000_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = Cluster(tmp_path_factory.mktemp("signals"))
    (place.folder / "long.yaml").write_text(LIGHT.replace(f"train_iters: {STEPS}", f"train_iters: {FOREVER}"))
    try:
        place.script("up", "3")
        yield place
    finally:
        place.script("down")


def line(*runtime: str, name: str, config: str = "long.yaml") -> list[str]:
    task = ["train", "pretrain", "--config", config, "--exp_name", name]
    return [sys.executable, "-m", "primus.cli.main", *runtime, "--", *task]


def run_of(cluster: Cluster, name: str) -> Run:
    (folder,) = (cluster.folder / "output" / name).glob("2*")
    return Run(folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_step_saves_when_its_launcher_is_told_to_end(cluster: Cluster, number: signal.Signals, code: int) -> None:
    name = number.name
    with terminal.opened(
        line("slurm", "srun", "-N", "2", "-c", "2", name=name), cluster.folder, cluster.environ
    ) as one:
        one.wait_for(r"step +\d")
        one.tell(number)
        assert one.ended() == code, one.shown
    run = run_of(cluster, name)
    outcome = run.read_metadata().outcome
    assert (outcome.state, outcome.exit_code) == ("interrupted", code)
    assert f"primus-cli: run interrupted: {outcome.reason}" in one.shown.replace("\r\n", "\n")
    saved = [event["step"] for event in events.read_events(run.events) if event["kind"] == "checkpoint_saved"]
    assert saved[-1] == events.read_steps(run.events)[-1]["step"]
    assert outcome.reason == f"{name}; saved at step {saved[-1]}"


def test_a_second_interrupt_ends_a_step_that_takes_its_time(cluster: Cluster) -> None:
    """Its failure hook is what takes the time here: the second one ends that as well."""
    hooks = cluster.folder / "slow-hooks" / "failure"
    hooks.mkdir(parents=True)
    (hooks / "01_slow.sh").write_text("sleep 600\n")
    environ = cluster.environ | {"PRIMUS_HOOKS": str(hooks.parent)}
    with terminal.opened(line("slurm", "srun", "-N", "2", "-c", "2", name="twice"), cluster.folder, environ) as one:
        one.wait_for(r"step +\d")
        one.type(CTRL_C)
        one.wait_for("failure hook")
        time.sleep(INSISTS_AFTER_S)  # as a person would: what comes sooner is the same event
        one.type(CTRL_C)
        assert one.ended(40) == 130, one.shown
    assert run_of(cluster, "twice").read_metadata().outcome.state == "interrupted"


def test_an_interrupt_withdraws_a_step_that_waits_for_nodes(cluster: Cluster) -> None:
    holder = cluster.ask("sbatch", "--parsable", "-N", "3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
    job = holder.stdout.strip()

    def list_jobs(state: str) -> list[str]:
        return cluster.ask("squeue", "--noheader", f"--states={state}", "--format=%i").stdout.split()

    try:
        # The job of the test before may still be completing.
        cli.wait_for(lambda: list_jobs("RUNNING") == [job], "the job that takes all nodes", timeout_s=60)
        words = line("slurm", "srun", "-N", "2", "--exclusive", name="waits")
        with terminal.opened(words, cluster.folder, cluster.environ) as one:
            one.wait_for("queued and waiting for resources", LONG_S)
            one.type(CTRL_C)
            assert one.ended(LONG_S) == 130, one.shown
        outcome = run_of(cluster, "waits").read_metadata().outcome
        assert (outcome.state, outcome.exit_code) == ("interrupted", 130)
        assert outcome.reason == "SIGINT, before any node started"
        assert list_jobs("PENDING") == []
    finally:
        cluster.ask("scancel", job)


def test_a_step_whose_launcher_is_killed_saves(cluster: Cluster) -> None:
    words = line("slurm", "srun", "-N", "2", "-c", "2", name="killed")
    with terminal.opened(words, cluster.folder, cluster.environ) as one:
        one.wait_for(r"step +\d")
        one.process.kill()
        run = run_of(cluster, "killed")
        deadline = time.monotonic() + 40
        while run.read_metadata().outcome.state == "running":
            assert time.monotonic() < deadline, one.shown
            time.sleep(0.1)
    assert run.read_metadata().outcome.reason.startswith("SIGUSR1; saved at step")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whoever_follows_a_job_can_leave_it_running(cluster: Cluster, number: signal.Signals, code: int) -> None:
    words = line("slurm", "sbatch", "-N", "2", "-c", "2", "--follow", name=f"followed{code}")
    with terminal.opened(words, cluster.folder, cluster.environ) as one:
        one.wait_for("iteration ")
        one.tell(number)
        assert one.ended(20) == code, one.shown
    assert "keeps running; cancel it: primus-cli direct -- jobs cancel" in one.shown
    assert run_of(cluster, f"followed{code}").read_metadata().outcome.state == "running"
    cluster.primus("direct", "--", "jobs", "cancel", f"followed{code}")
    waited = cluster.primus("direct", "--", "jobs", "wait", f"followed{code}", code=143)
    assert "primus-cli: run interrupted: SIGTERM; saved at step" in waited.stderr


def test_hooks_of_all_nodes_are_done_before_any_node_leaves(cluster: Cluster) -> None:
    """--wait=1 would end the others one second after the first; srun's default here is a minute."""
    write_hooks(cluster.folder / "hooks")
    environ = {"PRIMUS_HOOKS": str(cluster.folder / "hooks")}
    words = line("slurm", "srun", "-N", "3", "--wait=1", name="after", config="light.yaml")
    (cluster.folder / "light.yaml").write_text(LIGHT.replace("global_batch_size: 2", "global_batch_size: 3"))
    done = cluster.ask(*words, limit_s=150, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((cluster.folder / "said").read_text().split()) == ["after-0", "each-0", "each-1", "each-2"]


def test_a_failure_hook_of_node_0_is_done_and_the_exit_code_is_the_runs(cluster: Cluster) -> None:
    write_hooks(cluster.folder / "hooks")
    environ = cluster.environ | {"PRIMUS_HOOKS": str(cluster.folder / "hooks")}
    with terminal.opened(line("slurm", "srun", "-N", "2", name="fails"), cluster.folder, environ) as one:
        one.wait_for(r"step +\d")
        os.kill(pid_of_rank(run_of(cluster, "fails"), 1), signal.SIGKILL)
        assert one.ended(60) == 137, one.shown
    outcome = run_of(cluster, "fails").read_metadata().outcome
    assert outcome.reason == "rank 1 was killed by SIGKILL"
    assert f"primus-cli: run failed: {outcome.reason}" in one.shown
    assert sorted((cluster.folder / "said").read_text().split()) == ["each-0", "each-1", "failure-0"]


def test_a_lost_node_is_the_reason_of_a_job_that_was_waited_for(cluster: Cluster) -> None:
    words = line("slurm", "sbatch", "-N", "2", "-w", "n1,n2", "--wait", name="lost")
    with terminal.opened(words, cluster.folder, cluster.environ) as one:
        one.wait_for("is running")
        run = run_of(cluster, "lost")
        cluster.wait_for_step(run, 1)
        cluster.script("kill-node", "n2")
        try:
            code = one.ended(100)
        finally:
            cluster.script("start-node", "n2")
    outcome = run.read_metadata().outcome
    assert code == outcome.exit_code == 1, one.shown
    assert "n2 was lost" in outcome.reason
    assert f"primus-cli: run failed: {outcome.reason}" in one.shown


def write_hooks(folder: Path) -> None:
    """Hooks that take longer on node 0, and note where they ran."""
    said = folder.parent / "said"
    said.unlink(missing_ok=True)
    for stage in ("after", "failure"):
        (folder / stage).mkdir(parents=True, exist_ok=True)
        (folder / stage / "01_each.sh").write_text(f"echo each-$PRIMUS_NODE_RANK >>{said}\n")
        (folder / stage / "02_slow.once.sh").write_text(f"sleep 4; echo {stage}-$PRIMUS_NODE_RANK >>{said}\n")

"""Drills of real launches: two nodes on this machine, whose trainer needs no tensor library."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.test_slurm import LIGHT, STEPS
from fakes import cli
from fakes.small_disk import mount_small_disk
from primus.machine.cluster import FIRST_JOB_PORT, NUM_JOB_PORTS
from primus.runs.attempt import process_state

FOREVER = LIGHT.replace(f"train_iters: {STEPS}", "train_iters: 1000000")
TRAINING = ("--", "train", "pretrain", "--config", "light.yaml")
SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123456789"


@contextmanager
def two_nodes(folder: Path, *options: str, typed: tuple[str, ...] = ()) -> Iterator[list[subprocess.Popen[str]]]:
    """Two nodes of a drill in one folder."""
    (folder / "light.yaml").write_text(FOREVER)
    port = find_job_port()
    with ExitStack() as stack:
        processes = []
        for rank in (0, 1):
            place = ["--nproc", "1", "--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1"]
            words = ["--json", "direct", *place, "--master-port", str(port), "--", "drill", "--output", "drilled"]
            processes.append(stack.enter_context(cli.started(*words, *options, *TRAINING, *typed, cwd=folder)))
        yield processes


def find_job_port() -> int:
    """A free port, and a free one behind it, below those of outgoing connections: a drill uses them for minutes."""
    for port in range(FIRST_JOB_PORT + os.getpid() % 9000, FIRST_JOB_PORT + NUM_JOB_PORTS, 2):
        with contextlib.suppress(OSError), ExitStack() as stack:
            for each in (port, port + 1):
                stack.enter_context(socket.create_server(("", each)))
            return port
    pytest.fail("no free port")


def read_result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "drilled/drill.json").read_text())
    return values


@pytest.mark.slow
def test_two_nodes_recover_from_each_fault_with_equal_losses(tmp_path: Path) -> None:
    faults = ("kill-rank", "hang", "kill-node", "fill-disk")
    with mount_small_disk(tmp_path / "small", 8) as small:
        options = ("--minutes", "15", "--steps", "60", "--fill", str(small), "--faults", *faults)
        with two_nodes(tmp_path, *options, typed=("--mlflow_tracking_uri", f"https://u:{SECRET}@h")) as processes:
            outputs = [process.communicate(timeout=1000) for process in processes]
        assert list(small.iterdir()) == []
    assert [process.returncode for process in processes] == [0, 0], outputs
    printed = json.loads(outputs[0][0])
    assert printed == read_result(tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    cases = {case["fault"]: case for case in printed["cases"]}
    assert list(cases) == list(faults)
    for case in cases.values():
        assert (case["state"], case["is_blame_right"]) == ("recovered", True), case
        assert case["losses"]["num_after"] == case["losses"]["num_equal_after"] > 0
        assert case["detect_s"] > 0
        assert not list((Path(case["run"]) / "checkpoints").glob("*")), "checkpoints are deleted"
    assert (cases["kill-rank"]["rank"], cases["hang"]["rank"]) == (1, 0)
    assert [cases[name]["restarted_by"] for name in faults] == ["launcher", "launcher", "scheduler", ""]
    assert cases["kill-rank"]["steps_lost"] > 0
    assert [each["nodes"] for each in printed["goodput"]] == [64, 512, 4096]
    page = tmp_path / "drilled/drill.html"
    assert "kill-node" in page.read_text() and "passed" in page.read_text()


@pytest.mark.slow
def test_a_killed_drill_leaves_no_process(tmp_path: Path) -> None:
    with two_nodes(tmp_path, "--minutes", "10", "--steps", "30", "--faults", "hang") as processes:

        def find_stopped() -> int | None:
            for path in (tmp_path / "drilled/hang").glob("runs/*/2*/logs/attempt_0/rank_0.heartbeat.json"):
                pid: int = json.loads(path.read_text())["pid"]
                return pid if process_state(pid) == "T" else None
            return None

        cli.wait_for(find_stopped, "a stopped rank", timeout_s=300)
        started = [child.pid for process in processes for child in psutil.Process(process.pid).children(recursive=True)]
        assert started
        for process in processes:
            process.send_signal(signal.SIGKILL)
        cli.wait_for(lambda: not any(map(process_state, started)), "the end of all processes", timeout_s=30)


@pytest.mark.slow
def test_a_drill_that_is_told_to_stop_ends_its_launch(tmp_path: Path) -> None:
    (tmp_path / "light.yaml").write_text(FOREVER)
    words = ("direct", "--nproc", "1", "--", "drill", "--output", "drilled", *TRAINING)
    with cli.started(*words, cwd=tmp_path) as process:
        cli.wait_for(lambda: list(tmp_path.glob("drilled/reference/runs/*/2*/events.jsonl")), "a run", timeout_s=100)
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert not any(process_state(child.pid) for child in started)


@pytest.mark.slow
def test_a_job_that_does_not_train_is_the_error_of_the_drill(tmp_path: Path) -> None:
    (tmp_path / "light.yaml").write_text(FOREVER.replace("framework: bigram", "framework: nothing"))
    done = cli.run("direct", "--nproc", "1", "--", "drill", "--minutes", "2", *TRAINING, cwd=tmp_path, timeout_s=100)
    assert done.returncode == 1
    assert "the undisturbed run took no step" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no training is given"),
        (("--", "preflight"), "'preflight' is not a training"),
        (("--", "train", "pretrain", "--run", "x"), "needs --config"),
        ((*TRAINING, "--save", "/tmp/x"), "--save is set by the drill"),
        (("--at-nodes", "many", *TRAINING), "'many' is not a number of nodes"),
        (("--steps", "2", *TRAINING), "--steps"),
    ],
)
def test_a_wrong_command_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = cli.run("direct", "--", "drill", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_the_faults_and_why_others_are_skipped(tmp_path: Path) -> None:
    done = cli.run("--dry-run", "direct", "--nproc", "2", "--", "drill", "--minutes", "5", *TRAINING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kill-rank: kills one rank (SIGKILL), on the last node" in done.stdout
    assert "fill-disk: skipped: name a folder" in done.stdout
    assert "drop-network: skipped: one node has no network" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_pods_lists_the_faults_above_the_manifest(tmp_path: Path) -> None:
    runtime = ("kubernetes", "create", "--replica", "2", "--gpu", "1", "--image", "img:1")
    done = cli.run("--dry-run", *runtime, "--", "drill", "--minutes", "5", *TRAINING, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    above, _, manifest = done.stdout.partition("apiVersion: ")
    assert "# at most 5 minutes: an undisturbed run, then one for each fault" in above
    assert "# kill-rank: kills one rank (SIGKILL), on the last node" in above
    assert "# fill-disk: skipped: name a folder" in above
    assert "- drill" in manifest
    assert list(tmp_path.iterdir()) == []

"""`slurm -- container -- direct` on a real Slurm of two nodes with a real podman: one container for each node."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import containers
from cluster.containers import Podman
from cluster.seeing import EXPERIMENT, SEE
from fakes import cli

pytestmark = [pytest.mark.cluster("slurm", "podman"), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("slurm.sh")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Podman, dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="primus-test-") as folder:
        state = Path(folder) / "slurm"
        state.mkdir()
        small = Path(folder) / "small"  # mounted before the nodes take the mounts of this machine over
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(small)], check=True)
        podman = Podman(Path(folder) / "podman")
        try:
            subprocess.run(["bash", str(SCRIPT), "up", str(state), "2"], check=True, timeout=60)
            yield podman, {**podman.environ, "SLURM_CONF": f"{state}/slurm.conf"}
        finally:
            subprocess.run(["bash", str(SCRIPT), "down", str(state)], timeout=60, check=False)
            podman.end()
            subprocess.run(["umount", "-l", str(small)], check=False)


@pytest.fixture
def workplace(nodes: tuple[Podman, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "plugins/tasks").mkdir(parents=True)
    (tmp_path / "plugins/tasks/see.py").write_text(SEE)
    for name, value in nodes[1].items():
        monkeypatch.setenv(name, value)
    return tmp_path


def line(*task: str) -> list[str]:
    own = ["--engine", "podman", "--image", Podman.image, *containers.mounts(), "--env", "PRIMUS_PYTHON=/none"]
    return ["slurm", "srun", "-N", "2", "--", "container", *own, "--env", "A_TOKEN=canary", "--", *task]


@pytest.mark.native
def test_two_nodes_train_in_a_container_each(nodes: tuple[Podman, dict[str, str]], workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT.replace("global_batch_size: 1", "global_batch_size: 2"))
    done = cli.run(*line("train", "pretrain", "--config", "e.yaml"), cwd=workplace, timeout_s=150)
    assert done.returncode == 0, done.stderr
    folder = next(workplace.glob("output/e/2*/metadata.json")).parent
    assert json.loads((folder / "metadata.json").read_text())["outcome"]["state"] == "done"
    assert "on 2 x" in done.stdout, "both nodes' ranks are in one job"
    found = [json.loads((folder / name).read_text()) for name in ("container.json", "container.node_1.json")]
    assert [each["host"] for each in found] == ["n1", "n2"]
    assert len({each["name"] for each in found}) == 2
    texts = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert not any("canary" in text for text in [*texts, done.stdout, done.stderr])
    assert nodes[0]("ps", "-aq") == ""


@pytest.mark.native
def test_a_disk_that_fills_up_below_slurm_and_podman_is_the_reason_of_the_run(
    nodes: tuple[Podman, dict[str, str]], workplace: Path
) -> None:
    small = nodes[0].folder.with_name("small")
    config = EXPERIMENT.replace("global_batch_size: 1", "global_batch_size: 2, save_interval: 2")
    (workplace / "e.yaml").write_text(f"workspace: {small}\n{config}".replace("train_iters: 5", "train_iters: 20"))
    done = cli.run(*line("train", "pretrain", "--config", "e.yaml"), cwd=workplace, timeout_s=240)
    assert done.returncode == 1, done.stdout + done.stderr
    folder = next(small.glob("e/2*/metadata.json")).parent
    outcome = json.loads((folder / "metadata.json").read_text())["outcome"]
    assert (outcome["state"], "no space left" in outcome["reason"]) == ("failed", True), outcome
    assert "cause: a disk is full" in done.stdout + done.stderr
    assert nodes[0]("ps", "-aq") == ""


def test_a_signal_of_slurm_ends_the_task_on_each_node(nodes: tuple[Podman, dict[str, str]], workplace: Path) -> None:
    podman = nodes[0]
    plugins = str(workplace / "plugins")
    with cli.started(*line("see", "--waits"), cwd=workplace, PRIMUS_PLUGINS=plugins) as process:
        cli.wait_for((workplace / "seen.json").exists, "the task runs", timeout_s=40)
        cli.wait_for(lambda: len(podman.running()) == 2, "on both nodes", timeout_s=40)
        job = subprocess.run(
            ["squeue", "-h", "-o", "%A"], env=os.environ, capture_output=True, text=True
        ).stdout.split()
        subprocess.run(["scancel", "--signal=TERM", *job], check=True, timeout=20)
        process.communicate(timeout=60)
    assert set(json.loads((workplace / "heard").read_text())) == {15}, "maybe by more than one way, at the same time"
    assert podman("ps", "-aq") == ""

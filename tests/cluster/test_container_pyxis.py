"""`slurm -- container --engine pyxis` on a real Slurm of two nodes with the real plug-in and enroot, as root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import containers
from cluster.seeing import EXPERIMENT, SEE, seen
from components import PYXIS, WHERE
from fakes import cli

pytestmark = [pytest.mark.cluster("slurm", "pyxis"), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("slurm.sh")


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """An image file, while a cluster with pyxis runs."""
    with tempfile.TemporaryDirectory(prefix="primus-test-") as name:
        folder, state = Path(name), Path(name) / "slurm"
        rootfs = containers.root_file_system(folder / "rootfs")
        (rootfs / "etc/environment").write_text(f"PATH={containers.INSIDE_PATH}\nOF_IMAGE=1\nNCCL_DEBUG=of-image\n")
        pack = ["mksquashfs", str(rootfs), f"{folder}/test.sqsh", "-quiet", "-no-progress", "-comp", "gzip"]
        subprocess.run(pack, check=True, timeout=60)
        shutil.rmtree(rootfs)
        state.mkdir()
        # Slurm reads the file next to slurm.conf; the plug-in starts enroot, which it finds on the PATH of slurmd.
        (state / "plugstack.conf").write_text(f"required {PYXIS}/lib/spank_pyxis.so runtime_path={folder}/pyxis\n")
        path = f"{PYXIS}/bin:{WHERE}"
        try:
            up = ["bash", str(SCRIPT), "up", str(state), "2"]
            subprocess.run(up, check=True, timeout=60, env={**os.environ, "PATH": path})
            yield folder / "test.sqsh"
        finally:
            subprocess.run(["bash", str(SCRIPT), "down", str(state)], timeout=60, check=False)


@pytest.fixture
def workplace(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", f"{image.parent}/slurm/slurm.conf")
    (tmp_path / "plugins/tasks").mkdir(parents=True)
    (tmp_path / "plugins/tasks/see.py").write_text(SEE)
    return tmp_path


def line(
    image: Path, *task: str, slurm: tuple[str, ...] = ("srun", "-N", "1"), options: tuple[str, ...] = ()
) -> list[str]:
    own = ["--engine", "pyxis", "--image", str(image), *containers.mounts(), "--env", "PRIMUS_PYTHON=/none"]
    return ["slurm", *slurm, "--", "container", *own, *options, "--", *task]


def test_variables_mounts_and_the_working_folder_are_as_with_other_engines(image: Path, workplace: Path) -> None:
    (workplace / "data").mkdir()
    options = ("--env", "MINE=a b,c=$(id)", "--env", "A_TOKEN=canary", "--mount", f"{workplace}/data:/data:ro")
    shell = {"NCCL_DEBUG": "INFO", "CUDA_HOME": "/mine", "PRIMUS_PLUGINS": str(workplace / "plugins")}
    done = cli.run(*line(image, "see", "x y", options=options), cwd=workplace, timeout_s=90, **shell)
    assert done.returncode == 0, done.stdout + done.stderr
    found = seen(workplace)
    env = found["env"]
    assert isinstance(env, dict)
    assert (found["words"], found["cwd"]) == (["x y"], str(workplace))
    assert found["host"] in ("n1", "n2")
    wanted = {"MINE": "a b,c=$(id)", "A_TOKEN": "canary", "NCCL_DEBUG": "INFO", "OF_IMAGE": "1"}
    assert {name: env.get(name) for name in wanted} == wanted, "the run's variables win over those of the image"
    assert env["PATH"].startswith(containers.INSIDE_PATH) and not {"CUDA_HOME", "PYTHONPATH"} & env.keys()
    assert "canary" not in done.stdout + done.stderr


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_is_the_task_s(code: int, image: Path, workplace: Path) -> None:
    plugins = str(workplace / "plugins")
    words = line(image, "see", "--code", str(code))
    assert cli.run(*words, cwd=workplace, timeout_s=90, PRIMUS_PLUGINS=plugins).returncode == code


def test_a_signal_of_slurm_reaches_the_task_on_each_node(image: Path, workplace: Path) -> None:
    words = line(image, "see", "--waits", slurm=("srun", "-N", "2"))
    with cli.started(*words, cwd=workplace, PRIMUS_PLUGINS=str(workplace / "plugins")) as process:
        cli.wait_for((workplace / "seen.json").exists, "the task runs", timeout_s=60)
        process.terminate()
        process.communicate(timeout=60)
    assert (workplace / "heard").read_text() == "[15]"


@pytest.mark.native
@pytest.mark.parametrize("is_habit", [False, True])
def test_a_batch_job_trains_on_two_nodes(is_habit: bool, image: Path, workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT.replace("global_batch_size: 1", "global_batch_size: 2"))
    task = ("train", "pretrain", "--config", "e.yaml")
    slurm = ("sbatch", "--wait", "-N", "2", "-t", "10")
    words = line(image, *task, slurm=slurm)
    if is_habit:  # as users of pyxis type it
        typed = containers.mounts()[1::2]
        more = [f"--container-mounts={','.join(typed)}"] if typed else []
        words = ["slurm", *slurm, "--container-image", str(image), *more, "--", *task]
    done = cli.run(*words, cwd=workplace, timeout_s=200, XDG_STATE_HOME=str(workplace / "state"))
    logs = "".join(path.read_text() for path in workplace.glob("output/e/2*/logs/slurm-*.out"))
    assert done.returncode == 0, done.stderr + logs
    folder = next(workplace.glob("output/e/2*/metadata.json")).parent
    assert json.loads((folder / "metadata.json").read_text())["outcome"]["state"] == "done"
    assert "on 2 x" in logs, "both nodes' ranks are in one job"


def test_an_image_that_the_nodes_lack_is_named_by_jobs_wait(image: Path, workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT)
    slurm = ("sbatch", "--wait", "-N", "1")
    words = line(image.with_name("absent.sqsh"), "train", "pretrain", "--config", "e.yaml", slurm=slurm)
    done = cli.run(*words, cwd=workplace, timeout_s=90, XDG_STATE_HOME=str(workplace / "state"))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("primus-cli: run failed: srun exited with code 1 before an attempt")
    assert f"{image.parent}/absent.sqsh" in done.stdout.splitlines()[-1]

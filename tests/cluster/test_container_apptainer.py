"""`container` with a real apptainer: values arrive unchanged, signals pass, nothing outlives its launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from cluster import containers
from cluster.seeing import EXPERIMENT, HOSTILE, SEE, seen, started_inside
from fakes import cli, terminal
from primus.data.megatron.indexed_dataset import IndexedWriter

pytestmark = [pytest.mark.cluster("apptainer"), pytest.mark.slow]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("apptainer")
    rootfs = containers.root_file_system(folder / "rootfs")
    (rootfs / ".singularity.d/env").mkdir(parents=True)
    (rootfs / ".singularity.d/env/90-path.sh").write_text(f"export PATH={containers.INSIDE_PATH}\n")
    quick = ["--mksquashfs-args", "-comp gzip -Xcompression-level 1"]
    done = subprocess.run(
        ["apptainer", "build", *quick, f"{folder}/test.sif", str(rootfs)],
        env={**os.environ, "APPTAINER_TMPDIR": str(folder), "APPTAINER_CACHEDIR": f"{folder}/cache"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(rootfs)
    yield folder / "test.sif"
    (folder / "test.sif").unlink()


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "plugins/tasks").mkdir(parents=True)
    (tmp_path / "plugins/tasks/see.py").write_text(SEE)
    return tmp_path


def words(image: Path, *options: str) -> list[str]:
    return ["container", "--image", str(image), *containers.mounts(), "--env", "PRIMUS_PYTHON=/none", *options]


def run(*line: str, cwd: Path, **env: str | None) -> subprocess.CompletedProcess[str]:
    return cli.run(*line, cwd=cwd, timeout_s=90, PRIMUS_PLUGINS=str(cwd / "plugins"), **env)


def test_values_arrive_unchanged(image: Path, workplace: Path) -> None:
    values = {f"VALUE_{number}": value for number, value in enumerate(HOSTILE)}
    typed = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    options = [*typed, "--env", "LD_X=a b$(id)", "--env", "MINE"]
    shell = {"MINE": "my own", "HF_TOKEN": "canary", "CUDA_HOME": "/mine", "EDITOR": "$(id)"}
    done = run(*words(image, *options), "--", "see", *(f"x{value}" for value in HOSTILE), cwd=workplace, **shell)
    assert done.returncode == 0, done.stderr
    found = seen(workplace)
    assert found["words"] == [f"x{value}" for value in HOSTILE]
    env = found["env"]
    assert isinstance(env, dict)
    wanted = {**values, "LD_X": "a b$(id)", "MINE": "my own", "HF_TOKEN": "canary", "EDITOR": "$(id)"}
    assert {name: env.get(name) for name in wanted} == wanted
    assert env["PYTHONNOUSERSITE"] == "1" and not {"PYTHONPATH", "CUDA_HOME"} & env.keys()
    assert found["host"] == os.uname().nodename and found["cwd"] == str(workplace)


def test_folders_with_odd_names_are_seen(image: Path, workplace: Path) -> None:
    odd = workplace / 'a:b,c "d" é'
    odd.mkdir()
    plugins = str(workplace / "plugins")
    done = cli.run(*words(image), "--", "see", cwd=odd, PRIMUS_PLUGINS=plugins, timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert seen(odd)["cwd"] == str(odd)


@pytest.mark.parametrize("code", [0, 7, 200])
def test_the_exit_code_is_the_task_s(code: int, image: Path, workplace: Path) -> None:
    assert run(*words(image), "--", "see", "--code", str(code), cwd=workplace).returncode == code


def test_an_image_that_is_absent_is_one_message(workplace: Path) -> None:
    done = run("container", "--image", "absent.sif", "--", "see", cwd=workplace)
    assert done.returncode == 255
    assert "apptainer could not start the container" in done.stderr


def test_a_signal_reaches_the_task(image: Path, workplace: Path) -> None:
    line = [*words(image), "--", "see", "--waits"]
    with cli.started(*line, cwd=workplace, PRIMUS_PLUGINS=str(workplace / "plugins")) as process:
        cli.wait_for(lambda: started_inside(workplace), "the task runs")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 9


def test_nothing_outlives_a_launcher_that_is_killed(image: Path, workplace: Path) -> None:
    line = [*words(image, "--grace", "10"), "--", "see", "--waits"]
    with cli.started(*line, cwd=workplace, PRIMUS_PLUGINS=str(workplace / "plugins")) as process:
        cli.wait_for(lambda: started_inside(workplace), "the task runs")
        left = [
            each
            for each in psutil.Process(process.pid).children(recursive=True)
            if "watchdog" not in str(each.cmdline())
        ]
        assert left
        process.kill()
        cli.wait_for(lambda: not any(map(is_alive, left)), "its processes end")
    assert (workplace / "heard").exists(), "it was asked before it was ended"


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_shell_takes_commands_from_a_pipe(image: Path, workplace: Path) -> None:
    done = containers.shell(
        *words(image, "--env", "PATH=/usr/bin:/bin:/x", "--shell"),
        cwd=workplace,
        typed="echo in-$((1 + 1)) $PATH; exit 3\n",
    )
    assert done.returncode == 3 and "in-2 /usr/bin:/bin:/x" in done.stdout, done.stderr


@pytest.mark.native
def test_an_experiment_is_trained_in_a_container(image: Path, workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT)
    done = run(*words(image), "--", "train", "pretrain", "--config", "e.yaml", cwd=workplace)
    assert done.returncode == 0, done.stderr
    folder = next(workplace.glob("output/e/2*/metadata.json")).parent
    assert json.loads((folder / "metadata.json").read_text())["outcome"]["state"] == "done"
    record = json.loads((folder / "container.json").read_text())
    assert record["version"].startswith("apptainer version") and record["size_bytes"] == image.stat().st_size


@pytest.mark.native
@pytest.mark.parametrize(("data", "code"), [("here", 0), ("wrong", 2)])
def test_data_that_only_the_container_has_are_checked_inside(
    data: str, code: int, image: Path, workplace: Path
) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT.replace("mock_data: true", f"train_data_path: /stored/{data}"))
    (workplace / "tokens").mkdir()
    with IndexedWriter(workplace / "tokens/here", np.dtype(np.uint16)) as tokens:
        for number in range(20):
            tokens.add_document(np.full(32, number, np.uint16))
        tokens.commit()
    line = [*words(image, "--mount", f"{workplace}/tokens:/stored:ro"), "--", "train", "pretrain", "--config", "e.yaml"]
    assert f"no such data: /stored/{data}.idx on this machine" in run("--dry-run", *line, cwd=workplace).stdout
    done = run(*line, cwd=workplace)
    assert done.returncode == code, done.stdout + done.stderr
    outcome = json.loads(next(workplace.glob("output/e/2*/metadata.json")).read_text())["outcome"]
    assert outcome["exit_code"] == code
    if code:
        assert "no such data: /stored/wrong.idx" in outcome["reason"] and outcome["reason"] in done.stderr


@pytest.mark.native
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_in_a_terminal_saves_and_ends(number: signal.Signals, image: Path, workplace: Path) -> None:
    experiment = EXPERIMENT.replace("train_iters: 5", "train_iters: 1000000")
    with terminal.training(*words(image), cwd=workplace, experiment=experiment) as shown:
        shown.tell(number)
        terminal.check_saved(shown, workplace, number)

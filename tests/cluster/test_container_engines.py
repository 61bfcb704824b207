"""`container` with real engines: the same task, its exit code, its values, its end, and nobody else's containers."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import containers
from cluster.containers import Docker, Podman
from cluster.seeing import EXPERIMENT, HOSTILE, SEE, seen, started_inside
from fakes import cli, terminal
from fakes.unix_users import make_public_place, make_shared_folder, make_users
from primus.comparison.results.result import load_result

pytestmark = pytest.mark.slow


MATRIX = """\
name: rival
experiment: e.yaml
platforms: {cpu: {processes: 1}}
frameworks: [native]
models: {tiny: {}}
settings: {train_iters: 12}
repetitions: 2
"""
ABACUS = """\
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 2}}}
"""
ENGINES = {"podman": Podman, "docker": Docker}
IN_DOCKER = pytest.mark.parametrize(
    "engine", [pytest.param("docker", marks=pytest.mark.cluster("docker"))], indirect=True
)
"""For what is about the task: one engine shows it."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.cluster(name)) for name in ENGINES])
def engine(request: pytest.FixtureRequest) -> Iterator[Podman]:
    with tempfile.TemporaryDirectory(prefix="primus-test-") as folder:  # a socket's path must be short
        made = ENGINES[request.param](Path(folder) / request.param)
        yield made
        made.end()


@pytest.fixture
def workplace(engine: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "plugins/tasks").mkdir(parents=True)
    (tmp_path / "plugins/tasks/see.py").write_text(SEE)
    for name, value in engine.environ.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def words(engine: Podman, *options: str) -> list[str]:
    """A container that sees this interpreter, and cannot make another environment."""
    own = ["--engine", engine.name, "--image", engine.image, *containers.mounts(), "--env", "PRIMUS_PYTHON=/none"]
    return ["container", *own, *options]


def run(*line: str, cwd: Path, timeout_s: float = 60, **env: str | None) -> subprocess.CompletedProcess[str]:
    return cli.run(*line, cwd=cwd, timeout_s=timeout_s, PRIMUS_PLUGINS=str(cwd / "plugins"), **env)


@pytest.mark.native
def test_an_experiment_is_trained_in_a_container(engine: Podman, workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT)
    line = [*words(engine), "--", "train", "pretrain", "--config", "e.yaml"]
    done = run(*line, cwd=workplace, timeout_s=120)
    assert done.returncode == 0, done.stderr
    folder = next(workplace.glob("output/e/2*/metadata.json")).parent
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["outcome"]["state"] == "done"
    assert '"step":5' in (folder / "events.jsonl").read_text()
    image = json.loads((folder / "container.json").read_text())
    assert image["engine"] == engine.name and image["image"] == engine.image
    assert image["id"] == engine("image", "inspect", "--format", "{{.Id}}", engine.image)
    assert engine("ps", "-aq") == "", "it is removed"


def test_files_that_dockers_root_leaves_to_a_user_are_named_and_given_back(engine: Podman) -> None:
    if engine.name != "docker":
        pytest.skip("podman of another user has no root")
    with make_public_place() as folder:
        user, _ = make_users(folder)
        engine.folder.parent.chmod(0o755)
        os.chmod(engine.folder, 0o755)
        os.chmod(engine.folder / "socket", 0o666)
        shared = make_shared_folder(folder / "shared")
        (shared / "night.yaml").write_text(ABACUS)
        task = ("--", "train", "pretrain", "--config", "night.yaml")
        variables = {**engine.environ, "DOCKER_CONFIG": str(user.home)}
        # The interpreter may lie where only root, and so docker, sees it.
        places = [word.partition(":")[0] for word in containers.mounts()[1::2]]
        seen_by_docker = [word for path in places for word in ("--mount", f"type=bind,source={path},target={path}")]
        line = ["container", "--engine", "docker", "--image", engine.image, *seen_by_docker]
        line += ["--env", "PRIMUS_PYTHON=/none"]
        own = user.run(*line, "--user", *task, cwd=shared, **variables)
        assert "holds files of the image's user" not in own.stderr
        done = user.run(*line, *task, cwd=shared, **variables)
        said = next(line for line in done.stderr.splitlines() if "holds files of the image's user" in line)
        run = next(path for path in (shared / "output/night").glob("2*") if f"{path} holds" in said)
        assert "add --user to own what a container writes" in said
        assert (run / "events.jsonl").owner() == "root"
        given_back = shlex.split(said.partition("to own these: ")[2])
        assert engine(*given_back[1:], check=False) == ""
        assert {path.owner() for path in (run, *run.rglob("*"))} == {user.name}


@IN_DOCKER
@pytest.mark.native
def test_a_drill_in_a_container_recovers_from_a_killed_and_a_stopped_rank(engine: Podman, workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT)
    drill = ("drill", "--minutes", "8", "--steps", "24", "--faults", "kill-rank", "hang", "--output", "drilled")
    task = ("direct", "--nproc", "2", "--", *drill, "--", "train", "pretrain", "--config", "e.yaml")
    words_of_task = (*task, "--train_iters", "1000000", "--global_batch_size", "2")
    done = run(*words(engine), "--", *words_of_task, cwd=workplace, timeout_s=500, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((workplace / "drilled/drill.json").read_text())["cases"]
    found = [(case["fault"], case["state"], case["rank"], case["is_blame_right"]) for case in cases]
    assert found == [("kill-rank", "recovered", 1, True), ("hang", "recovered", 0, True)]
    assert all(case["losses"]["num_after"] == case["losses"]["num_equal_after"] > 0 for case in cases)
    assert engine("ps", "-aq") == "", "it is removed"


@IN_DOCKER
@pytest.mark.native
def test_cells_of_a_comparison_run_in_one_container_or_in_one_each(engine: Podman, workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT)
    (workplace / "rival.yaml").write_text(MATRIX)
    done = run(*words(engine), "--", "compare", "run", "--matrix", "rival.yaml", cwd=workplace, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    runtime = shlex.join(words(engine))
    more = ("--repetitions", "1", "--output", "each", "--runtime", runtime)
    done = run("direct", "--", "compare", "run", "--matrix", "rival.yaml", *more, cwd=workplace, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert engine("ps", "-aq") == "", "all are removed"
    results = [load_result(path) for path in sorted(workplace.glob("*/**/results/*.json"))]
    assert [(each.state, len(each.steps.number)) for each in results] == [("done", 12)] * 3
    assert len({each.inputs.weights for each in results}) == 1
    places = ("output/rival", "each")
    assert run("direct", "--", "compare", "report", *places, "--html", cwd=workplace).returncode == 0


@pytest.mark.native
def test_a_benchmark_runs_in_a_container_and_its_files_are_outside(engine: Podman, workplace: Path) -> None:
    task = ("benchmark", "gemm", "-M", "32", "-N", "32", "-K", "32", "--dtype", "fp32", "--quick", "--device", "cpu")
    done = run(*words(engine), "--", *task, "--output-file", "g.jsonl", cwd=workplace, timeout_s=120)
    assert done.returncode == 0, done.stderr
    row = json.loads((workplace / "g.jsonl").read_text())
    assert row["unit"] == "TFLOP/s" and row["value"] > 0 and row["wrong"] == 0


def test_values_arrive_unchanged(engine: Podman, workplace: Path) -> None:
    values = {f"VALUE_{number}": value for number, value in enumerate(HOSTILE)}
    typed = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    options = [*typed, "--env", "LD_X=a b$(id)", "--env", "MINE"]
    done = run(
        *words(engine, *options),
        "--",
        "see",
        *(f"x{value}" for value in HOSTILE),
        cwd=workplace,
        MINE="my own",
        HF_TOKEN="canary",
        NCCL_DEBUG="INFO",
        EDITOR="vi",
    )
    assert done.returncode == 0, done.stderr
    found = seen(workplace)
    assert found["words"] == [f"x{value}" for value in HOSTILE]
    env = found["env"]
    assert isinstance(env, dict)
    assert {
        **values,
        "LD_X": "a b$(id)",
        "MINE": "my own",
        "HF_TOKEN": "canary",
        "NCCL_DEBUG": "INFO",
    }.items() <= env.items()
    assert "EDITOR" not in env and env["PATH"] == containers.INSIDE_PATH
    assert found["host"] == os.uname().nodename and found["cwd"] == str(workplace)


def test_folders_with_odd_names_are_seen(engine: Podman, workplace: Path) -> None:
    odd = workplace / 'a:b,c "d" é'
    (odd / "plugins/tasks").mkdir(parents=True)
    (odd / "plugins/tasks/see.py").write_text(SEE)
    done = cli.run(*words(engine), "--", "see", cwd=odd, PRIMUS_PLUGINS=None, timeout_s=60)
    assert done.returncode == 2 and "no task 'see'" in done.stderr, "a colon separates folders of plug-ins"
    done = run(*words(engine, "--mount", f"{workplace}:/in:ro"), "--", "see", cwd=workplace)
    assert done.returncode == 0, done.stderr
    done = cli.run(*words(engine), "--", "see", cwd=odd, PRIMUS_PLUGINS=str(workplace / "plugins"), timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert seen(odd)["cwd"] == str(odd)


@pytest.mark.parametrize("code", [0, 7, 200])
def test_the_exit_code_is_the_task_s(code: int, engine: Podman, workplace: Path) -> None:
    assert run(*words(engine), "--", "see", "--code", str(code), cwd=workplace).returncode == code


def test_an_image_that_is_absent_is_one_message(engine: Podman, workplace: Path) -> None:
    line = ["container", "--engine", engine.name, "--image", "localhost/absent:1", "--pull", "never", "--", "see"]
    done = run(*line, cwd=workplace)
    assert done.returncode == 125
    assert "image localhost/absent:1 could not be pulled" in done.stderr


def test_limits_are_as_high_as_they_may_be(engine: Podman, workplace: Path) -> None:
    import resource

    assert run(*words(engine), "--", "see", cwd=workplace).returncode == 0
    line = next(line for line in str(seen(workplace)["limits"]).splitlines() if line.startswith("Max open files"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(line.split()[4]) >= min(hard, 1048576)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_task_and_only_its_container(number: int, engine: Podman, workplace: Path) -> None:
    engine(
        "run",
        "-d",
        "--name",
        "foreign",
        "--network",
        "none",
        "--ulimit",
        "nofile=1024",
        "--label",
        "primus.user=99",
        engine.image,
        "sleep",
        "300",
    )
    try:
        with cli.started(
            *words(engine), "--", "see", "--waits", cwd=workplace, PRIMUS_PLUGINS=str(workplace / "plugins")
        ) as process:
            cli.wait_for(lambda: started_inside(workplace), "the task runs")
            assert len(engine.running()) == 2
            process.send_signal(number)
            process.communicate(timeout=30)
        if number == signal.SIGTERM:
            assert (workplace / "heard").read_text() == "[15]", "once"
        assert process.returncode == (9 if number == signal.SIGTERM else 130)
        assert engine.running() == ["foreign"]
        cleaned = run("container", "--engine", engine.name, "--clean", cwd=workplace)
        assert cleaned.returncode == 0, cleaned.stderr
        assert engine.running() == ["foreign"]
    finally:
        engine.remove("foreign")


@pytest.mark.parametrize("tracker", ["linuxproc", "cgroup"])
def test_a_signal_to_a_slurm_step_reaches_the_task(engine: Podman, workplace: Path, tracker: str) -> None:
    """Slurm signals all processes of a step, or its tasks alone: proctrack/linuxproc, proctrack/cgroup."""
    line = [*words(engine), "--", "see", "--waits"]
    plugins = str(workplace / "plugins")
    with cli.started(*line, cwd=workplace, PRIMUS_PLUGINS=plugins, SLURM_STEP_ID="0") as process:
        cli.wait_for(lambda: started_inside(workplace), "the task runs")
        client = next(child for child in psutil.Process(process.pid).children() if child.name() == engine.name)
        if tracker == "linuxproc":
            client.terminate()
        process.terminate()
        process.communicate(timeout=30)
    assert set(json.loads((workplace / "heard").read_text())) == {15}, "maybe by two ways, at the same time"
    assert process.returncode == 9


def test_a_container_does_not_outlive_a_launcher_that_is_killed(engine: Podman, workplace: Path) -> None:
    line = [*words(engine, "--grace", "20"), "--", "see", "--waits"]
    with cli.started(*line, cwd=workplace, PRIMUS_PLUGINS=str(workplace / "plugins")) as process:
        cli.wait_for(lambda: started_inside(workplace), "the task runs")
        process.kill()
    cli.wait_for(lambda: engine("ps", "-aq") == "", "the container is gone")
    assert (workplace / "heard").exists(), "it was asked before it was ended"


def test_a_client_that_is_killed_takes_its_container_along(engine: Podman, workplace: Path) -> None:
    with cli.started(
        *words(engine), "--", "see", "--waits", cwd=workplace, PRIMUS_PLUGINS=str(workplace / "plugins")
    ) as process:
        cli.wait_for(lambda: started_inside(workplace), "the task runs")
        client = next(child for child in psutil.Process(process.pid).children() if child.name() == engine.name)
        client.kill()
        process.communicate(timeout=40)
    assert process.returncode == 137
    assert engine("ps", "-aq") == "" and (workplace / "heard").exists()


def test_a_run_s_left_over_container_is_stopped_when_it_is_started_again(engine: Podman, workplace: Path) -> None:
    labels = {
        "primus.run": "20260101_000000-abcd",
        "primus.user": str(os.getuid()),
        "primus.host": os.uname().nodename,
        "primus.node": "0",
        "primus.launcher": "1.0.gone",
    }
    typed = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    engine(
        "run",
        "-d",
        *typed,
        "--name",
        "left",
        "--network",
        "none",
        "--ulimit",
        "nofile=1024",
        engine.image,
        "sleep",
        "300",
    )
    config = workplace / "e.yaml"
    config.write_text(
        "modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8}}}\n"
    )
    plugins = f"{workplace}/plugins:{cli.PLUGINS}"
    made = cli.run(
        *words(engine, "--grace", "1"),
        "--",
        "train",
        "pretrain",
        "--config",
        "e.yaml",
        "train_iters=1",
        cwd=workplace,
        PRIMUS_PLUGINS=plugins,
        timeout_s=60,
    )
    assert made.returncode == 0, made.stderr
    assert engine.running() == ["left"], "of another run"
    folder = next(workplace.glob("output/e/2*/metadata.json")).parent
    folder.rename(folder.parent / "20260101_000000-abcd")
    again = cli.run(
        *words(engine, "--grace", "1"),
        "--",
        "train",
        "pretrain",
        "--run",
        "output/e/20260101_000000-abcd",
        cwd=workplace,
        PRIMUS_PLUGINS=plugins,
        timeout_s=60,
    )
    assert "removing container without a launcher" in again.stdout
    assert engine.running() == []
    engine.remove("left")


def test_a_shell_opens_where_a_task_would_run(engine: Podman, workplace: Path) -> None:
    leader, terminal = pty.openpty()
    script = "import sys\nfrom primus.cli.main import main\nsys.exit(main())"
    line = [sys.executable, "-c", script, *words(engine, "--env", "MINE=my own", "--shell")]
    process = subprocess.Popen(
        line,
        cwd=workplace,
        env=cli.environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        os.write(leader, b'tty >/dev/null; [ -t 0 ] && echo "it""-is $MINE $BASH" ; pwd; exit 5\n')
        text = read_until_end(leader, process)
        assert "it-is my own" in text and "bash" in text and str(workplace) in text
        assert process.wait(timeout=20) == 5
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(leader)
    assert engine("ps", "-aq") == ""


def read_until_end(leader: int, process: subprocess.Popen[bytes]) -> str:
    text, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline:
        if not select.select([leader], [], [], 0.2)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            text += os.read(leader, 4096)
        except OSError:
            break
    return text.decode(errors="replace")


def test_a_shell_takes_commands_from_a_pipe(engine: Podman, workplace: Path) -> None:
    done = containers.shell(*words(engine, "--shell"), cwd=workplace, typed="echo in-$((1 + 1)); exit 3\n")
    assert done.returncode == 3 and "in-2" in done.stdout, done.stderr


@pytest.mark.native
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_in_a_terminal_saves_and_ends(number: signal.Signals, engine: Podman, workplace: Path) -> None:
    experiment = EXPERIMENT.replace("train_iters: 5", "train_iters: 1000000")
    with terminal.training(*words(engine), cwd=workplace, experiment=experiment) as shown:
        shown.tell(number)
        terminal.check_saved(shown, workplace, number)


@pytest.mark.native
def test_a_rank_that_is_killed_at_the_memory_limit_says_so(engine: Podman, workplace: Path) -> None:
    (workplace / "e.yaml").write_text(EXPERIMENT)
    line = [*words(engine, "--memory", "150m"), "--", "train", "pretrain", "--config", "e.yaml"]
    done = run(*line, cwd=workplace, timeout_s=120)
    if "memory limit capabilities" in done.stderr or done.returncode == 126:
        pytest.skip("this machine's engine cannot limit memory")
    assert done.returncode == 137, done.stderr
    assert "the memory limit of 150 MiB of its container or job was reached" in done.stderr


def test_a_variable_that_direct_names_arrives(engine: Podman, workplace: Path) -> None:
    done = run(*words(engine), "--", "direct", "--env", "MINE", "--", "see", cwd=workplace, MINE="a b$(id)")
    assert done.returncode == 0, done.stderr
    found = seen(workplace)["env"]
    assert isinstance(found, dict) and found["MINE"] == "a b$(id)"

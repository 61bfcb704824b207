"""Containers from start to end, with engines that write down what they are asked."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shlex
import signal
import string
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import cli
from fakes.engines import Engines
from fakes.tools import is_gone
from primus.cli.main import main
from primus.runtimes.container import lifecycle

EXPERIMENT = """\
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 2}}}
"""
TRAIN = ["train", "pretrain", "--config", "night.yaml"]
ENGINES = ["docker", "podman", "apptainer"]


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines(tmp_path / "engines")
    monkeypatch.setenv("PATH", made.path)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(cli.PLUGINS))
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return made


def container(engine: str, *words: str) -> list[str]:
    return ["container", "--engine", engine, "--image", "img", *words]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
VALUE = TEXT | st.sampled_from(["$(touch x)", "`touch x`", "a,b=c", "'\"", "a\nb", "*", "\\", "é €", "x" * 100_000])
PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\0/:"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and name.strip() == name
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(engine=st.sampled_from(ENGINES), value=VALUE, word=VALUE, name=PATHS)
def test_any_value_arrives_unchanged(engines: Engines, engine: str, value: str, word: str, name: str) -> None:
    for path in ("argv", "environ"):
        (engines.folder / path).unlink(missing_ok=True)
    (Path.cwd() / name).mkdir(exist_ok=True)
    typed = ["--env", f"VALUE={value}", "--env", f"LD_VALUE={value}", "--mount", f"{Path.cwd()}/{name}:/in/{name}"]
    words = [*container(engine, *typed), "--", "runs", "show", f"x{word}"]
    if any(character < " " for character in name):
        assert main(words) == 2
        return
    assert main(words) == 0
    argv = engines.argv
    assert argv[-3:] == ["runs", "show", f"x{word}"]
    inner = argv[argv.index("direct") :]
    assert inner[1:5] == ["--env", f"LD_VALUE={value}", "--env", "VALUE"] or inner[1:5] == [
        "--env",
        "VALUE",
        "--env",
        f"LD_VALUE={value}",
    ]
    assert engines.environ["VALUE"] == value
    assert "LD_VALUE" not in engines.environ
    assert mounted(argv)[f"/in/{name}"] == f"{Path.cwd()}/{name}"


def mounted(argv: list[str]) -> dict[str, str]:
    """Sources of all mounts by target, as the engines read them."""
    found = {}
    for option, word in itertools.pairwise(argv):
        if option == "--bind":
            source, target = word.split(":")[:2]
            found[target] = source
        elif option == "--mount":
            fields = dict(field.partition("=")[::2] for field in next(csv.reader([word], strict=True)))
            found[fields["target"]] = fields["source"]
    return found


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(string.ascii_letters + string.digits + "_.-$ \n'", min_size=1, max_size=20))
def test_a_name_arrives_unchanged_or_is_refused(engines: Engines, name: str) -> None:
    (engines.folder / "argv").unlink(missing_ok=True)
    code = main([*container("docker"), f"--name={name}", "--", "runs", "list"])
    if code == 0:
        argv = engines.argv
        assert argv[argv.index("--name") + 1] == name
    else:
        assert code == 2 and not (engines.folder / "argv").exists()


SECRETS = {"HF_TOKEN": "canary-a", "HTTPS_PROXY": "http://me:canary-b@proxy:1", "AWS_SECRET_ACCESS_KEY": "canary-c"}


@pytest.mark.parametrize("engine", ENGINES)
def test_no_secret_is_told(engine: str, engines: Engines, tmp_path: Path) -> None:
    engines.record_success()
    (tmp_path / "secrets.env").write_text("MLFLOW_TRACKING_PASSWORD=canary-d\nPLAIN=1\n")
    options = [
        "--env",
        "GH_TOKEN=canary-e",
        "--env=X_API_KEY=canary-f",
        "-e",
        "Y_TOKEN=canary-g",
        "--env",
        "secrets.env",
    ]
    words = [*container(engine, *options, "--env", "AWS_SECRET_ACCESS_KEY"), "--", *TRAIN]
    for form in (["--dry-run"], ["--dry-run", "--json"]):
        shown = cli.run(*form, *words, cwd=tmp_path, **SECRETS)
        assert shown.returncode == 0, shown.stderr
        assert "canary" not in shown.stdout + shown.stderr
    done = cli.run(*words, cwd=tmp_path, **SECRETS)
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout + done.stderr + " ".join(engines.argv) + " ".join(engines.calls)
    run = next(tmp_path.glob("output/night/2*/launch.container.json")).parent
    kept = [path for path in run.rglob("*") if path.is_file()]
    assert len(kept) > 3 and "canary" not in "".join(path.read_text() for path in kept)
    given = {**SECRETS, "GH_TOKEN": "canary-e", "X_API_KEY": "canary-f", "Y_TOKEN": "canary-g"}
    given["MLFLOW_TRACKING_PASSWORD"] = "canary-d"
    assert given.items() <= engines.environ.items(), "they are passed on all the same"
    if engine != "apptainer":
        assert given.keys() <= set(engines.argv), "by name"


@pytest.mark.parametrize(
    "words", [["--label", "token=canary"], ["--env", "DOCKER_AUTH_CONFIG=canary"], ["--env", "A_TOKEN=canary", "stray"]]
)
def test_no_error_tells_a_secret(words: list[str], engines: Engines, tmp_path: Path) -> None:
    for rest in (["--", *TRAIN], ["--shell"]):
        done = cli.run(*container("docker", *words), *rest, cwd=tmp_path)
        assert done.returncode == 2
        assert "canary" not in done.stdout + done.stderr
    assert not any(call.startswith("docker run") for call in engines.calls)


def test_the_exit_code_is_the_program_s(engines: Engines, tmp_path: Path) -> None:
    engines.inside("exit 7")
    done = cli.run(*container("docker"), "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 7
    metadata = json.loads(next(tmp_path.glob("output/night/2*/metadata.json")).read_text())
    assert metadata["outcome"]["reason"] == "docker exited with code 7, before any node started"


@pytest.mark.parametrize(
    ("code", "said"),
    [(125, "docker could not start the container"), (126, "cannot be executed"), (127, "was not found")],
)
def test_an_engine_s_own_exit_codes_are_explained(code: int, said: str, engines: Engines, tmp_path: Path) -> None:
    engines.inside(f"exit {code}")
    done = cli.run(*container("docker"), "--", "runs", "list", cwd=tmp_path)
    assert done.returncode == code
    assert f"exit code {code} usually means: " in done.stderr and said in done.stderr


@pytest.mark.parametrize(
    ("before", "is_explained"), [("true", True), ("cd output/night/2*; mkdir -p logs; echo x >logs/launch.log", False)]
)
def test_the_exit_code_of_a_launcher_that_has_started_is_not_the_engine_s(
    before: str, is_explained: bool, engines: Engines, tmp_path: Path
) -> None:
    engines.inside(f"{before}; exit 127")
    done = cli.run(*container("docker"), "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 127
    assert ("primus needs `sh` and Python" in done.stderr) is is_explained, done.stderr


def test_an_image_that_is_not_there_is_named(engines: Engines, tmp_path: Path) -> None:
    engines.make("podman", "#!/bin/sh\n[ $1 = ps ] || exit 125\n")
    done = cli.run(*container("podman"), "--", "runs", "list", cwd=tmp_path)
    assert done.returncode == 125
    assert "image img could not be pulled: try `podman pull img`" in done.stderr


def test_an_option_of_ours_that_was_misspelt_is_recognized_where_the_engine_refuses_it(
    engines: Engines, tmp_path: Path
) -> None:
    engines.inside("exit 125")
    done = cli.run(
        *container("docker", "--device", "/dev/x", "--userns=host", "--grac", "5"), "--", "runs", "list", cwd=tmp_path
    )
    assert done.returncode == 125
    assert done.stderr.endswith("  --grac was passed to the engine: did you mean '--grace'?\n")


def test_an_engine_that_is_absent_or_cannot_be_used_is_one_message(engines: Engines, tmp_path: Path) -> None:
    done = cli.run(*container("docker"), "--", *TRAIN, cwd=tmp_path, PATH="/nowhere")
    assert done.returncode == 3
    assert "docker is not installed here (chosen by: --engine)" in done.stderr
    engines.make("docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    done = cli.run(*container("docker"), "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 3
    assert "docker cannot be used: Cannot connect to the Docker daemon" in done.stderr
    states = [json.loads(file.read_text())["outcome"] for file in tmp_path.glob("output/night/2*/metadata.json")]
    assert [state["exit_code"] for state in states] == [3, 3]


def test_a_mount_that_is_missing_is_an_error_and_in_a_dry_run_a_note(engines: Engines, tmp_path: Path) -> None:
    words = [*container("docker", "--mount", "/no/such/folder"), "--", "runs", "list"]
    dry = cli.run("--dry-run", *words, cwd=tmp_path)
    assert dry.returncode == 0 and "note: mount source /no/such/folder does not exist" in dry.stdout
    done = cli.run(*words, cwd=tmp_path)
    assert done.returncode == 2 and "mount source /no/such/folder does not exist" in done.stderr
    assert not engines.calls, "a dry run asks nothing either"


def test_the_image_of_a_run_is_recorded(engines: Engines, tmp_path: Path) -> None:
    engines.record_success()
    assert cli.run(*container("docker"), "--", *TRAIN, cwd=tmp_path).returncode == 0
    found = json.loads(next(tmp_path.glob("output/night/2*/container.json")).read_text())
    assert found["image"] == "img" and found["version"] == "fake 1.0"
    assert found["id"] == "sha256:0123" and found["digest"] == "registry/image@sha256:4567"
    assert f"--name {found['name']}" in " ".join(engines.calls)


def labels(run: str, launcher: str, **others: str) -> str:
    own = {"primus.user": str(os.getuid()), "primus.host": os.uname().nodename, "primus.node": "0"}
    return json.dumps({**own, "primus.run": run, "primus.launcher": launcher, **others})


def a_run(engines: Engines, tmp_path: Path) -> str:
    """A run folder that was made, and whose container is gone: its image ran another program, and ended with 0."""
    done = cli.run(*container("docker"), "--", *TRAIN, cwd=tmp_path)
    assert (done.returncode, "docker exited with code 0, but nothing was run" in done.stderr) == (1, True)
    (engines.folder / "calls").unlink()
    return next(tmp_path.glob("output/night/2*/metadata.json")).parent.name


def test_what_an_earlier_launcher_left_of_this_run_is_stopped_first(engines: Engines, tmp_path: Path) -> None:
    run = a_run(engines, tmp_path)
    (engines.folder / "ps").write_text("old\nforeign\n")
    (engines.folder / "inspect-old").write_text(f"running {labels(run, '1.0.x')}\n")
    (engines.folder / "inspect-foreign").write_text(f"running {labels('another', '1.0.x')}\n")
    words = ["--grace", "9", "--", "train", "pretrain", "--run", f"output/night/{run}"]
    engines.record_success()
    done = cli.run(*container("docker"), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"removing container without a launcher old of run {run}" in done.stdout
    stops = [call for call in engines.calls if call.split()[1] in ("stop", "rm", "kill")]
    assert stops == ["docker stop -t 9 old", "docker rm -f old"]


def test_a_run_that_is_being_done_is_not_done_twice(engines: Engines, tmp_path: Path) -> None:
    run = a_run(engines, tmp_path)
    begun = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    (engines.folder / "ps").write_text("other\n")
    (engines.folder / "inspect-other").write_text(f"running {labels(run, f'{os.getpid()}.{begun}.x')}\n")
    done = cli.run(*container("docker"), "--", "train", "pretrain", "--run", f"output/night/{run}", cwd=tmp_path)
    assert done.returncode == 1
    assert f"this run is already running in container other, started by process {os.getpid()}" in done.stderr
    assert not any(call.split()[1] in ("stop", "rm", "run") for call in engines.calls)


def test_clean_removes_ended_containers_of_ours_only(engines: Engines, tmp_path: Path) -> None:
    begun = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    (engines.folder / "ps").write_text("ended running led stranger\n")
    (engines.folder / "inspect-ended").write_text(f"exited {labels('a', '1.0.x')}\n")
    (engines.folder / "inspect-running").write_text(f"running {labels('b', '1.0.x')}\n")
    (engines.folder / "inspect-led").write_text(f"created {labels('c', f'{os.getpid()}.{begun}.x')}\n")
    other = {"primus.user": "4711"}
    (engines.folder / "inspect-stranger").write_text(f"exited {labels('d', '1.0.x', **other)}\n")
    done = cli.run("container", "--engine", "docker", "--clean", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    def list_removals() -> list[str]:
        return [call for call in engines.calls if call.split()[1] in ("stop", "rm", "kill")]

    assert list_removals() == ["docker stop -t 0 ended", "docker rm -f ended"]
    for options in ((), ("--clean",)):
        (engines.folder / "calls").write_text("")
        assert cli.run(*container("docker", *options, "--", "runs", "list"), cwd=tmp_path).returncode == 0
        assert ("docker rm -f ended" in list_removals()) is bool(options)


LIVES = 'echo $$ >"{folder}/pid"; trap "exit 9" TERM; while [ ! -e "{folder}/stopped" ]; do sleep 0.05; done'


def test_a_signal_reaches_the_client_once(engines: Engines, tmp_path: Path) -> None:
    engines.inside(f"echo $$ >{engines.folder}/pid; trap 'echo heard; exit 9' TERM; while :; do sleep 0.05; done")
    with cli.started(*container("docker"), "--", "runs", "list", cwd=tmp_path) as process:
        cli.wait_for((engines.folder / "pid").exists, "the container runs")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 9 and out.count("heard") == 1


def test_a_container_that_does_not_end_in_its_time_is_killed(engines: Engines, tmp_path: Path) -> None:
    body = 'trap "" TERM; : >"{0}/pid"; while [ ! -e "{0}/stopped" ]; do sleep 0.05; done; exit 137'
    engines.inside(body.format(engines.folder))
    (engines.folder / "ps").write_text("mine\n")
    with cli.started(*container("docker", "--grace", "0.3"), "--", "runs", "list", cwd=tmp_path) as process:
        cli.wait_for((engines.folder / "pid").exists, "the container runs")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 137, err
    assert "still running 0.3 s after the stop signal: killing the container" in out
    assert "docker kill mine" in engines.calls


def test_what_apptainer_has_started_is_killed_when_its_time_is_over(engines: Engines, tmp_path: Path) -> None:
    engines.inside(f'trap "" TERM; : >"{engines.folder}/pid"; while :; do sleep 0.05; done')
    with cli.started(*container("apptainer", "--grace", "0.3"), "--", "runs", "list", cwd=tmp_path) as process:
        cli.wait_for((engines.folder / "pid").exists, "the container runs")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 137


@pytest.mark.parametrize("engine", ["docker", "apptainer"])
def test_a_container_ends_when_its_launcher_is_killed(engine: str, engines: Engines, tmp_path: Path) -> None:
    engines.inside(LIVES.format(folder=engines.folder))
    with cli.started(*container(engine, "--grace", "2"), "--", "runs", "list", cwd=tmp_path) as process:
        cli.wait_for((engines.folder / "pid").exists, "the container runs")
        (engines.folder / "ps").write_text("mine\n")
        process.kill()
        pid = int((engines.folder / "pid").read_text())
        cli.wait_for(lambda: is_gone(pid), "the container ends")
    if engine == "docker":
        assert "docker stop -t 2 mine" in engines.calls


def test_a_client_that_dies_takes_its_container_with_it(engines: Engines, tmp_path: Path) -> None:
    engines.inside("kill -KILL $$")
    (engines.folder / "ps").write_text("")
    with cli.started(*container("docker", "--grace", "4"), "--", "runs", "list", cwd=tmp_path) as process:
        process.communicate(timeout=20)
    assert process.returncode == 137
    asked = [call for call in engines.calls if "primus.launcher=" in call and " ps " in call]
    assert asked, "it has looked for the container of its own launcher"


def test_a_shell_without_a_task_is_the_engine_s(engines: Engines, tmp_path: Path) -> None:
    done = cli.run(*container("docker", "--shell", "--env", "A=1", "--env", "PATH=/opt"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert engines.argv[-4] == "img" and "bash" in engines.argv[-1]
    assert "PATH=/opt" in engines.argv and engines.environ["A"] == "1"
    assert not list(tmp_path.glob("output")), "no run folder"
    shown = cli.run("--dry-run", "--json", *container("docker", "--shell"), cwd=tmp_path)
    assert json.loads(shown.stdout)["argv"][:2] == ["docker", "run"]


def test_a_shell_with_a_task_says_how_to_start_it(engines: Engines, tmp_path: Path) -> None:
    done = cli.run(*container("docker", "--shell"), "--", *TRAIN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = next(tmp_path.glob("output/night/2*/metadata.json")).parent
    assert f"direct -- train pretrain --run {run}" in done.stdout
    assert json.loads((run / "metadata.json").read_text())["outcome"]["state"] == "planned"


def test_a_container_on_a_cluster_is_planned_there(engines: Engines, tmp_path: Path) -> None:
    done = cli.run(
        "--dry-run", "grid", "--", *container("docker", "--env", "A_TOKEN=canary"), "--", *TRAIN, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    script = next(line for line in done.stdout.splitlines() if "| " in line and "container" in line)
    words = shlex.split(script.partition("| ")[2])
    assert words[1:8] == ["container", "--engine", "docker", "--image", "img", "--env", "A_TOKEN"]
    assert "devices, groups and limits are determined on each node" in done.stdout
    assert "canary" not in done.stdout + done.stderr


def test_the_watchdog_ends_with_its_launcher(engines: Engines, tmp_path: Path) -> None:
    assert cli.run(*container("docker"), "--", "runs", "list", cwd=tmp_path).returncode == 0
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not [line for line in left.splitlines() if "watchdog.py" in line and str(engines.folder) in line]
    assert sys.executable


def test_a_container_whose_client_died_is_stopped_and_gives_its_devices_back(engines: Engines, tmp_path: Path) -> None:
    engines.inside(f"echo mine >{engines.folder}/ps; kill -KILL $$")
    with cli.started(*container("docker", "--grace", "4"), "--", "runs", "list", cwd=tmp_path) as process:
        process.communicate(timeout=20)
    assert process.returncode == 137
    assert "docker stop -t 4 mine" in engines.calls


def test_the_watchdog_outlives_signals_to_it(engines: Engines, tmp_path: Path) -> None:
    import psutil

    engines.inside(LIVES.format(folder=engines.folder))
    with cli.started(*container("docker", "--grace", "2"), "--", "runs", "list", cwd=tmp_path) as process:
        cli.wait_for((engines.folder / "pid").exists, "the container runs")
        (engines.folder / "ps").write_text("mine\n")
        watchdogs = [
            each for each in psutil.Process(process.pid).children() if "watchdog.py" in " ".join(each.cmdline())
        ]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            watchdogs[0].send_signal(number)
        process.kill()
        cli.wait_for(lambda: "docker stop -t 2 mine" in engines.calls, "the container ends")


def test_a_second_signal_does_not_extend_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    clock, waits, killed = [100.0], [], []

    def select(readers: list[int], *others: object) -> tuple[list[int], list[int], list[int]]:
        waits.append(others[-1])
        if len(waits) > 2:
            return [], [], []
        clock[0] += 4
        os.write(write, bytes([signal.SIGTERM]))
        return readers, [], []

    monkeypatch.setattr(lifecycle.select, "select", select)
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(lifecycle, "_kill_container", lambda launch, label: killed.append(label))
    launch = SimpleNamespace(grace_s=10.0, say=lambda text: None)
    lifecycle._wait_for_deadline(launch, "mine", read)  # type: ignore[arg-type]
    os.close(read)
    os.close(write)
    assert waits == [None, 10.0, 6.0], "no limit without a signal; 10 s after the first; 4 s have passed at the second"
    assert killed == ["mine"]


@pytest.mark.parametrize(("rank", "state"), [("0", "failed"), ("1", "planned")])
def test_node_0_alone_records_that_its_container_cannot_start(
    engines: Engines, tmp_path: Path, rank: str, state: str
) -> None:
    assert cli.run(*container("docker", "--shell"), "--", *TRAIN, cwd=tmp_path).returncode == 0
    run = next(tmp_path.glob("output/night/2*/metadata.json")).parent
    words = ("--mount", "/not/here:/data", "--", "train", "pretrain", "--run", str(run))
    failed = cli.run(*container("docker", *words), cwd=tmp_path, NODE_RANK=rank, NNODES="2")
    assert failed.returncode == 2 and "/not/here" in failed.stderr
    assert json.loads((run / "metadata.json").read_text())["outcome"]["state"] == state


def test_apptainer_gets_the_hard_limits_of_this_user(engines: Engines, tmp_path: Path) -> None:
    engines.inside(f"for name in n l; do ulimit -S -$name; ulimit -H -$name; done >{engines.folder}/limits")
    words = [sys.executable, "-m", "primus", *container("apptainer"), "--", "runs", "list"]
    lowered = ["sh", "-c", 'ulimit -S -n 256 && ulimit -S -l 16 && exec "$@"', "sh", *words]
    env = {**cli.environment(), "PATH": engines.path}
    subprocess.run(lowered, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=60)
    files, most_files, locked, most_locked = (engines.folder / "limits").read_text().split()
    assert files == most_files != "256" and locked == most_locked != "16"


def test_of_the_launcher_s_children_only_those_of_the_container_are_killed() -> None:
    marked = {**os.environ, lifecycle.MARK: "1.2.x"}
    with (
        subprocess.Popen(["sleep", "60"], env=marked) as inside,
        subprocess.Popen(["sleep", "60"]) as hook,
    ):
        engine = SimpleNamespace(engine=SimpleNamespace(program="apptainer"))
        lifecycle._kill_container(SimpleNamespace(container=engine), "")  # type: ignore[arg-type]
        assert inside.wait(10) == -signal.SIGKILL
        hook.terminate()
        assert hook.wait(10) == -signal.SIGTERM, "nothing else has ended it"

"""A profiler attaches to the Python process of a rank; tools are executables on PATH that record their arguments."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.errors import EXIT_FAILED, EXIT_UNFIT, EXIT_USAGE
from primus.runs import events
from primus.runs.attempt import heartbeat_file
from primus.runs.files import write_json
from primus.runs.store import Run, RunMetadata, create_run

Start = Callable[..., int]
Tool = Callable[[str, str], Path]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    metadata = RunMetadata(id="20250101_000000-0001", name="night", task="train pretrain", created=1.0)
    return create_run(tmp_path / "output/night/20250101_000000-0001", metadata)


@pytest.fixture
def start(run: Run, tmp_path: Path) -> Iterator[Start]:
    """``start(rank)`` starts a worker of the run below a shell with the same words; gives the id of the worker."""
    package = tmp_path / "fake/primus"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "worker.py").write_text("import os\nprint(os.getpid(), flush=True)\ninput()\n")
    shells = []

    def start_worker(rank: int, **variables: str) -> int:
        command = f"{sys.executable} -m primus.worker {run.directory} 0; true"
        env = {**os.environ, "RANK": str(rank), "PYTHONPATH": str(tmp_path / "fake"), **variables}
        shell = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        shells.append(shell)
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        beat = {"pid": pid, "host": socket.gethostname(), "time": time.time(), "phase": "train", "step": 3}
        write_json(heartbeat_file(run.attempt_folder(0), rank), beat)
        return pid

    yield start_worker
    for shell in shells:
        shell.communicate("\n", timeout=60)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """``tool(name, script)`` puts a shell script on the PATH; `$*` are its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> Path:
        (folder / name).write_text(f'#!/bin/sh\necho "$*" >> {folder}/called\n{script}\n')
        (folder / name).chmod(0o755)
        return folder / "called"

    return write


ROCPROF = '[ "$1" = --help ] && exit; while [ "$1" != "-d" ]; do shift; done; echo trace > "$2/out.pftrace"'


def attach(run: Run, *words: str) -> int:
    return main(["direct", "--", "profile", "attach", str(run.directory), *words])


def test_rocprofv3_attaches_to_the_worker_and_not_to_its_shell(
    run: Run, start: Start, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    start(0, ROCP_TOOL_ATTACH="1")
    pid = start(1, ROCP_TOOL_ATTACH="1")
    called = tool("rocprofv3", ROCPROF)
    assert attach(run, "--rank", "1", "--with", "rocprofv3", "--seconds", "2", "--json") == 0
    assert f"--attach {pid} --attach-duration-msec 2000 --kernel-trace" in called.read_text()
    (event,) = [event for event in events.read_events(run.events) if event["kind"] == "profile_attached"]
    assert (event["rank"], event["tool"]) == (1, "rocprofv3")
    assert (run.directory / event["files"][0]).read_text() == "trace\n"
    assert json.loads(capsys.readouterr().out)["pid"] == pid


@pytest.mark.parametrize("has_option", [True, False])
def test_rocprofv3_writes_before_it_returns_where_it_has_an_option_for_it(
    has_option: bool, run: Run, start: Start, tool: Tool
) -> None:
    start(0, ROCP_TOOL_ATTACH="1")
    option = "--attach-sync-output" if has_option else "--other"
    called = tool("rocprofv3", f'if [ "$1" = --help ]; then echo "usage: {option}"; exit 0; fi\n{ROCPROF}')
    assert attach(run, "--with", "rocprofv3", "--seconds", "1") == 0
    attached = [line for line in called.read_text().splitlines() if line.startswith("--attach ")]
    assert len(attached) == 1 and ("--attach-sync-output" in attached[0]) == has_option


@pytest.mark.parametrize(
    ("script", "variables", "code", "problem"),
    [
        (ROCPROF, {}, EXIT_UNFIT, "was started without ROCP_TOOL_ATTACH=1"),
        ("true", {"ROCP_TOOL_ATTACH": "1"}, EXIT_FAILED, "rocprofv3 recorded nothing"),
        ("echo no such agent >&2; exit 1", {"ROCP_TOOL_ATTACH": "1"}, EXIT_FAILED, "recorded nothing of process"),
    ],
)
def test_what_attaching_lacks_is_said(
    run: Run, start: Start, tool: Tool, capsys: pytest.CaptureFixture[str],
    script: str, variables: dict[str, str], code: int, problem: str,
) -> None:  # fmt: skip
    start(0, **variables)
    tool("rocprofv3", script)
    assert attach(run, "--with", "rocprofv3") == code
    assert problem in capsys.readouterr().err
    assert not list(run.directory.glob("profiles/**/*pftrace"))


def test_a_tool_that_is_missing_and_a_rank_that_does_not_run_are_named(
    run: Run, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attach(run) == EXIT_USAGE
    assert "no rank has written a heartbeat" in capsys.readouterr().err
    start(0)
    assert attach(run, "--rank", "7") == EXIT_USAGE
    assert "has no rank 7" in capsys.readouterr().err
    assert attach(run, "--with", "nsys") == EXIT_UNFIT
    assert "nsys is not on the PATH" in capsys.readouterr().err
    old = {"pid": 1, "host": "elsewhere", "time": time.time() - 3600, "phase": "train", "step": 3}
    write_json(heartbeat_file(run.attempt_folder(0), 0), old)
    assert attach(run) == EXIT_USAGE
    assert "its last heartbeat is 3,600 s old" in capsys.readouterr().err
    write_json(heartbeat_file(run.attempt_folder(0), 0), {**old, "time": time.time()})
    assert attach(run) == EXIT_USAGE
    assert "runs on elsewhere, as process 1" in capsys.readouterr().err


def test_nsys_needs_a_session_that_launched_the_worker(
    run: Run, start: Start, tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    start(0)
    tool("nsys", 'echo "ID TIME STATE LAUNCH NAME"')
    assert attach(run, "--with", "nsys", "--seconds", "0.1") == EXIT_USAGE
    assert "nsys attaches only to processes that it has launched" in capsys.readouterr().err
    started = 'case "$1" in sessions) echo "7 00:10 Launched 1 mine";; start) echo x > "${3#--output=}.nsys-rep";; esac'
    called = tool("nsys", started)
    assert attach(run, "--with", "nsys", "--seconds", "0.1") == 0
    assert "stop --session=mine" in called.read_text()


def test_nsys_records_the_session_of_the_worker_and_no_other_one(run: Run, start: Start, tool: Tool) -> None:
    start(0, PRIMUS_NSYS_SESSION="primus-of-this-run")
    listed = 'sessions) echo "7 00:10 Launched 1 of-another-run";;'
    called = tool("nsys", f'case "$1" in {listed} start) echo x > "${{3#--output=}}.nsys-rep";; esac')
    assert attach(run, "--with", "nsys", "--seconds", "0.1") == 0
    assert "stop --session=primus-of-this-run" in called.read_text() and "another" not in called.read_text()


FAILING = """\
import os
from pathlib import Path


def check(experiment):
    pass


def train(experiment, attempt):
    Path("session.txt").write_text(os.environ["PRIMUS_NSYS_SESSION"])
    raise ValueError("a rank that fails")
"""
EXPERIMENT = (
    "{exp_name: e, workspace: output, modules: {pre_trainer: {framework: failing, model: tiny,"
    " overrides: {mock_data: true, seq_length: 8, train_iters: 1}}}}\n"
)


def test_a_rank_that_fails_below_nsys_fails_the_run_though_nsys_ends_well(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugins/frameworks").mkdir(parents=True)
    (tmp_path / "plugins/frameworks/failing.py").write_text(FAILING)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path / "plugins"))
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    launched = tool("nsys", 'shift; while [ "${1#--}" != "$1" ]; do shift; done; "$@"; exit 0')
    words = ["direct", "--attachable", "nsys", "--no-hooks", "--", "train", "pretrain", "--config", "e.yaml"]
    assert main(words) == EXIT_FAILED
    assert "a rank that fails" in capsys.readouterr().err
    assert f"launch --session-new={Path('session.txt').read_text()} --trace=cuda,nvtx" in launched.read_text()

"""The agent of a node reports how its ranks ended as JSON; the launcher reads nothing else of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import cli

pytest.importorskip("torch")
pytestmark = pytest.mark.native


def latest(folder: Path) -> Path:
    return (folder / "out/tiny/latest").resolve()


def report(folder: Path) -> dict[str, Any]:
    return json.loads((latest(folder) / "logs/attempt_0/agent.node_0.json").read_text())


def wait_for_ranks(folder: Path, count: int) -> list[int]:
    """Processes of the ranks, once all of them are at work."""

    def are_at_work() -> bool:
        beats = list((folder / "out").glob("tiny/latest/logs/attempt_*/rank_*.heartbeat.json"))
        return len(beats) == count and all('"phase": "train"' in beat.read_text() for beat in beats)

    cli.wait_for(are_at_work, f"{count} ranks at work", timeout_s=60)
    beats = sorted((latest(folder) / "logs/attempt_0").glob("rank_*.heartbeat.json"))
    return [json.loads(beat.read_text())["pid"] for beat in beats]


def find_agent(launcher: int) -> psutil.Process:
    (agent,) = psutil.Process(launcher).children()
    assert any("elastic_agent" in word for word in agent.cmdline())
    return agent


def test_exit_code_and_rank_are_known_when_torchelastic_logs_nothing(tmp_path: Path) -> None:
    done = cli.run("direct", "--nproc", "2", "--", "tiny", "exit", "--rank", "1", cwd=tmp_path, LOGLEVEL="CRITICAL")
    assert done.returncode == 1
    assert done.stderr.startswith("primus-cli: run failed: rank 1 exited with code 7 and no message\n")
    assert [(each["rank"], each["exit_code"]) for each in report(tmp_path)["exits"]] == [(1, 7)]
    error = json.loads((latest(tmp_path) / "logs/attempt_0/rank_1.error.json").read_text())
    assert (error["rank"], error["log"]) == (1, "logs/attempt_0/rank_1.log")


def test_killed_rank_is_named_though_its_peer_ignores_the_request_to_stop(tmp_path: Path) -> None:
    with cli.started("direct", "--nproc", "2", "--", "tiny", "ignore", cwd=tmp_path) as process:
        pids = wait_for_ranks(tmp_path, 2)
        os.kill(pids[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 137
    assert errors.startswith("primus-cli: run failed: rank 1 was killed by SIGKILL\n")
    assert not (latest(tmp_path) / "logs/attempt_0/rank_0.error.json").exists()


def test_signals_to_every_process_leave_the_ranks_time_to_save(tmp_path: Path) -> None:
    with cli.started("direct", "--nproc", "2", "--", "tiny", "save", cwd=tmp_path) as process:
        pids = wait_for_ranks(tmp_path, 2)
        for each in [process.pid, find_agent(process.pid).pid, *pids]:
            os.kill(each, signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (143, "primus-cli: run interrupted: SIGTERM; saved at step 3\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_agent_alone_has_its_ranks_save(tmp_path: Path, number: signal.Signals) -> None:
    with cli.started("direct", "--nproc", "2", "--", "tiny", "save", cwd=tmp_path) as process:
        wait_for_ranks(tmp_path, 2)
        find_agent(process.pid).send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (
        143,
        "primus-cli: run interrupted: SIGTERM to the workers; saved at step 3\n",
    )
    assert report(tmp_path)["signal"] == number.name


def test_a_killed_agent_is_named_and_no_rank_outlives_it(tmp_path: Path) -> None:
    with cli.started("direct", "--nproc", "2", "--", "tiny", "ignore", cwd=tmp_path) as process:
        pids = wait_for_ranks(tmp_path, 2)
        find_agent(process.pid).kill()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 137
    assert errors.startswith("primus-cli: run failed: the elastic agent of node 0 was killed by SIGKILL")
    cli.wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the end of the ranks", timeout_s=10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hangup_of_the_launcher_has_its_ranks_save(tmp_path: Path, ranks: int) -> None:
    with cli.started("direct", "--nproc", str(ranks), "--", "tiny", "save", cwd=tmp_path) as process:
        wait_for_ranks(tmp_path, ranks)
        process.send_signal(signal.SIGHUP)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (129, "primus-cli: run interrupted: SIGHUP; saved at step 3\n")


def test_the_agent_leaves_no_temporary_files(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for act in ("end", "kill"):
        cli.run("direct", "--nproc", "2", "--", "tiny", act, cwd=tmp_path, TMPDIR=str(temporary))
    assert not list(temporary.iterdir())


def test_an_error_of_the_agent_itself_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = [f"--report={file}", "--nproc-per-node=2", "--nnodes=1", "--rdzv-backend=pigeon", "--rdzv-endpoint=a:1"]
    done = subprocess.run(
        [sys.executable, "-m", "primus.elastic_agent", *words, "worker.py"],
        env=cli.environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert json.loads(file.read_text())["error"].startswith("ValueError: ")

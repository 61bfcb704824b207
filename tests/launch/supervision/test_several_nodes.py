"""Nodes of one job are supervised together: a failure is known on all nodes at once, and node 0 decides."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from fakes import cli

pytestmark = [pytest.mark.native, pytest.mark.slow]
PLUGINS = str(cli.PLUGINS.parent / "shifts")


class Nodes:
    """Two launchers of one job, in two folders or in one."""

    def __init__(self, processes: list[Popen[str]], folders: tuple[Path, Path]) -> None:
        self.processes, self.folders = processes, folders

    def run(self, node: int = 0) -> Path:
        (run,) = [entry for entry in (self.folders[node] / "out/shift").iterdir() if not entry.is_symlink()]
        return run

    def events(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = (self.run() / "events.jsonl").read_text().splitlines()
        except (OSError, ValueError):
            return []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def pid(self, rank: int, attempt: int = 0) -> int:
        """Process of a rank that is at work."""
        found: list[int] = []

        def look() -> bool:
            try:
                beat = json.loads((self.run(rank) / f"logs/attempt_{attempt}/rank_{rank}.heartbeat.json").read_text())
            except (OSError, ValueError):
                return False
            found.append(beat["pid"])
            return bool(beat["phase"] == "train")

        cli.wait_for(look, f"rank {rank} at work", timeout_s=40)
        return found[-1]

    def ended(self, timeout_s: float = 40) -> list[tuple[int, str, str]]:
        outputs = [process.communicate(timeout=timeout_s) for process in self.processes]
        return [(process.returncode, *output) for process, output in zip(self.processes, outputs, strict=True)]


@contextmanager
def nodes(folder: Path, port: int, *options: str, acts: str = "none", task: tuple[str, ...] = ()) -> Iterator[Nodes]:
    folders = (folder / "a", folder / "b")
    with ExitStack() as stack:
        processes = []
        for rank, own in enumerate(folders):
            own.mkdir()
            place = ["--nproc", "1", "--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1"]
            words = ["direct", *place, "--master-port", str(port), *options, "--", "shift", acts, *task]
            processes.append(stack.enter_context(cli.started(*words, cwd=own, PRIMUS_PLUGINS=PLUGINS)))
        yield Nodes(processes, folders)


LONG = ("--steps", "2000")


def test_a_killed_rank_restarts_both_nodes_within_five_seconds(tmp_path: Path, port: int) -> None:
    task = ("--steps", "250", "--save", "10")
    with nodes(tmp_path, port, "--max-restarts", "1", "--restart-delay", "0.5", task=task) as both:
        pids = [both.pid(rank) for rank in (0, 1)]
        cli.wait_for(lambda: both.events("checkpoint_saved"), "a checkpoint")
        killed_at = time.time()
        os.kill(pids[1], signal.SIGKILL)
        results = both.ended()
        (restart,) = both.events("restart")
    assert [code for code, _, _ in results] == [0, 0], results
    assert restart["time"] - killed_at < 5
    (failure,) = both.events("failure")
    assert (failure["rank"], failure["problem"]) == (1, "rank 1 was killed by SIGKILL")
    for node in (0, 1):
        assert (both.run(node) / f"logs/attempt_1/rank_{node}.log").exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_without_restarts_both_nodes_end_with_the_same_code_and_reason(tmp_path: Path, port: int) -> None:
    with nodes(tmp_path, port, task=LONG) as both:
        pid = both.pid(1)
        both.pid(0)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        results = both.ended(15)
        taken_s = time.monotonic() - began
    assert [code for code, _, _ in results] == [137, 137]
    for _, _, errors in results:
        assert "primus-cli: run failed: rank 1 was killed by SIGKILL\n" in errors
    assert taken_s < 8


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_dies_ends_the_other_node_at_once(tmp_path: Path, port: int, lost: int) -> None:
    with nodes(tmp_path, port, "--max-restarts", "3", task=LONG) as both:
        pids = [both.pid(rank) for rank in (0, 1)]
        began = time.monotonic()
        both.processes[lost].kill()
        _, errors = both.processes[1 - lost].communicate(timeout=15)
        taken_s = time.monotonic() - began
    assert both.processes[1 - lost].returncode == 1
    assert "was lost: its launcher has died" in errors
    assert taken_s < 6
    cli.wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the end of all ranks", timeout_s=5)
    if lost == 1:
        (end,) = both.events("attempt_ended")
        assert (end["end"], end["hosts"]) == ("lost node", [socket.gethostname()])


@pytest.mark.parametrize("node", [0, 1])
def test_sigusr1_to_one_node_lets_all_ranks_save_and_exit(tmp_path: Path, port: int, node: int) -> None:
    with nodes(tmp_path, port, task=LONG) as both:
        for rank in (0, 1):
            both.pid(rank)
        both.processes[node].send_signal(signal.SIGUSR1)
        results = both.ended(20)
    assert [code for code, _, _ in results] == [138, 138]
    assert both.events("attempt_ended")[0]["end"] == "preempted"
    assert both.events("checkpoint_saved")


def test_a_hanging_rank_of_another_node_is_blamed(tmp_path: Path, port: int) -> None:
    with nodes(
        tmp_path, port, "--hang-timeout", "6", acts="stop@20", task=(*LONG, "--rank", "1", "--step-s", "0.1")
    ) as both:
        results = both.ended(120)
    assert [code for code, _, _ in results] == [1, 1], results
    (hang,) = both.events("hang")
    assert hang["rank"] == 1
    assert "its process is stopped" in results[0][2] and "its process is stopped" in results[1][2]


def test_c10d_rendezvous_works_in_a_second_attempt(tmp_path: Path, port: int) -> None:
    options = ("--rdzv-backend", "c10d", "--max-restarts", "1", "--restart-delay", "0")
    with nodes(tmp_path, port, *options, acts="kill@4", task=("--steps", "8")) as both:
        results = both.ended(60)
    assert [code for code, _, _ in results] == [0, 0], results

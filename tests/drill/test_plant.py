"""Faults are planted in processes of the drill only, and undone whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import cli
from fakes.small_disk import mount_small_disk
from primus.drill import plant
from primus.drill.fault_kinds import FaultPermissions
from primus.drill.guard import FaultUndo, read_start_time, undo_fault
from primus.drill.plant import BALLAST, find_own_ranks, plant_fault
from primus.launch.supervision.heartbeats import RankHeartbeat
from primus.runs.attempt import process_state

LAUNCHER = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)


@pytest.fixture
def launcher() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that has started another, and the number of that one."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    try:
        yield process, int(process.stdout.readline())
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait(10)
        process.stdout.close()


def beat(pid: int, launcher: int) -> RankHeartbeat:
    return RankHeartbeat(
        pid=pid, host=socket.gethostname(), launcher=launcher, phase="train", step=3, progress_time=0.0
    )


def write_beat(workspace: Path, rank: int, attempt: int, pid: int, launcher: int) -> None:
    folder = workspace / f"e/20260101_000000-abcd/logs/attempt_{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    values = {"pid": pid, "host": "h", "launcher": launcher, "phase": "train", "step": attempt, "progress_time": 0.0}
    (folder / f"rank_{rank}.heartbeat.json").write_text(json.dumps(values))


def test_only_processes_of_the_launcher_are_found(
    tmp_path: Path, launcher: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, pid = launcher
    write_beat(tmp_path, 0, 0, pid, process.pid)
    write_beat(tmp_path, 1, 0, os.getpid(), process.pid)  # a number that another process has got
    write_beat(tmp_path, 2, 0, pid, os.getpid())  # of another launcher
    write_beat(tmp_path, 3, 0, 2**22 + 1, process.pid)  # has ended
    assert set(find_own_ranks(tmp_path, process.pid)) == {0}
    write_beat(tmp_path, 0, 1, pid, process.pid)
    assert find_own_ranks(tmp_path, process.pid)[0].step == 1


def test_a_stopped_rank_continues_when_the_fault_is_undone(launcher: tuple[subprocess.Popen[bytes], int]) -> None:
    process, pid = launcher
    fault = plant_fault("hang", beat(pid, process.pid), process, FaultPermissions())
    cli.wait_for(lambda: process_state(pid) == "T", "a stopped process")
    fault.undo()
    fault.undo()
    assert process_state(pid) != "T"


def test_a_stopped_rank_continues_when_the_drill_is_killed(launcher: tuple[subprocess.Popen[bytes], int]) -> None:
    process, pid = launcher
    drill = os.fork()
    if not drill:
        plant_fault("hang", beat(pid, process.pid), process, FaultPermissions())
        signal.pause()
    cli.wait_for(lambda: process_state(pid) == "T", "a stopped process")
    os.kill(drill, signal.SIGKILL)
    os.waitpid(drill, 0)
    cli.wait_for(lambda: process_state(pid) != "T", "a running process")


def test_a_slow_rank_stops_and_runs_in_turn(
    launcher: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, pid = launcher
    monkeypatch.setattr(plant, "find_slow_time_s", lambda step_s: 1.5)
    fault = plant_fault("slow-rank", beat(pid, process.pid), process, FaultPermissions())
    states = set()
    deadline = time.monotonic() + 1.3
    while time.monotonic() < deadline:
        fault.tick()
        states.add(process_state(pid))
        time.sleep(0.003)
    assert {"T", "S"} <= states
    cli.wait_for(lambda: fault.tick() or process_state(pid) != "T", "the end of the fault")
    time.sleep(0.5)
    fault.tick()
    assert process_state(pid) != "T"


def test_a_killed_node_leaves_nothing(launcher: tuple[subprocess.Popen[bytes], int]) -> None:
    process, pid = launcher
    plant_fault("kill-node", beat(pid, process.pid), process, FaultPermissions())
    assert process.poll() == -signal.SIGKILL
    cli.wait_for(lambda: not process_state(pid), "the end of the rank")


def test_a_disk_is_full_until_the_fault_is_undone(
    tmp_path: Path, launcher: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, pid = launcher
    with mount_small_disk(tmp_path / "small", 2) as folder:
        fault = plant_fault("fill-disk", beat(pid, process.pid), process, FaultPermissions(fill=str(folder)))
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(bytes(4096))
        fault.undo()
        assert not (folder / BALLAST).exists()
        (folder / "more").write_bytes(bytes(4096))


def test_a_process_with_the_number_of_an_ended_one_is_not_continued(
    launcher: tuple[subprocess.Popen[bytes], int],
) -> None:
    pid = launcher[1]
    os.kill(pid, signal.SIGSTOP)
    cli.wait_for(lambda: process_state(pid) == "T", "a stopped process")
    undo_fault(FaultUndo(pid=pid, started="1"))
    assert process_state(pid) == "T"
    undo_fault(FaultUndo(pid=pid, started=read_start_time(pid)))
    cli.wait_for(lambda: process_state(pid) != "T", "a running process")

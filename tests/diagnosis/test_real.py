"""Failures caused here, with the programs that write these lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.cli import wait_for
from primus.diagnosis.diagnose import diagnose_logs
from primus.diagnosis.finding import Diagnosis

LIMIT_S = 60
MEET = (
    "import torch.distributed as d, datetime as t; "
    "d.TCPStore({host!r}, {port}, {world}, {is_master}, timeout=t.timedelta(seconds=3))"
)
RANK = """\
import os, pathlib, sys, time, torch, torch.distributed as d
d.init_process_group("gloo")
pathlib.Path(sys.argv[1], f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
while True:
    d.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""


def python(code: str, log: Path) -> None:
    with log.open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT_S)


def of(log: Path) -> Diagnosis:
    return diagnose_logs([log])


@contextlib.contextmanager
def small_disk(tmp_path: Path) -> Iterator[str]:
    """A file on a disk that is full after a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
        yield "/dev/full"
        return
    try:
        yield str(folder / "checkpoint")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    with small_disk(tmp_path) as file:
        python(f"with open({file!r}, 'wb') as out: out.write(bytes(1 << 22))", log)
    found = of(log)
    assert found.cause and (found.cause.signature, found.first_rank) == ("disk-full", 0)


@pytest.mark.native
def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        python(MEET.format(host="127.0.0.1", port=port, world=1, is_master=True), tmp_path / "a.log")
    found = of(tmp_path / "a.log")
    assert found.cause and (found.cause.signature, found.action) == ("port-in-use", "retry")


@pytest.mark.native
def test_a_master_without_an_address(tmp_path: Path) -> None:
    python(MEET.format(host="no-such-host.invalid", port=29555, world=2, is_master=False), tmp_path / "a.log")
    found = of(tmp_path / "a.log")
    assert found.cause and found.cause.signature == "unknown-host"


@pytest.mark.native
@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun(tmp_path: Path) -> None:
    script, logs = tmp_path / "rank.py", tmp_path / "logs"
    script.write_text(RANK)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--log-dir={logs}", "--redirects=3"]
    with (tmp_path / "launch.log").open("wb") as out:
        child = subprocess.Popen([sys.executable, *words, str(script), str(tmp_path)], stdout=out, stderr=out)
    try:
        wait_for((tmp_path / "pid_1").is_file, "the second rank", LIMIT_S)
        wait_for(lambda: (tmp_path / "pid_1").read_text(), "its process")
        os.kill(int((tmp_path / "pid_1").read_text()), signal.SIGKILL)
        child.wait(LIMIT_S)
    finally:
        child.kill()
        child.wait()
    found = diagnose_logs([tmp_path / "launch.log", logs])
    assert found.cause and found.cause.signature == "killed"
    assert (found.first_rank, found.action) == (1, "retry")
    assert {cause.role for cause in found.causes[1:]} <= {"cascade"} and found.causes[1:]

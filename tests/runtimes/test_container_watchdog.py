"""The process that stops a container whose launcher was killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primus.runtimes.container import watchdog

LIMIT_S = 20


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine with one container, which notes its calls."""
    file = tmp_path / "docker"
    file.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n[ $1 != ps ] || echo 4f2a\n')
    file.chmod(0o755)
    return file


@pytest.fixture
def mark() -> str:
    return f"PRIMUS_LAUNCHER=test.{secrets.token_hex(8)}"


@pytest.fixture
def marked(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the launcher, which ignores SIGTERM."""
    name, _, value = mark.partition("=")
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=os.environ | {name: value}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def run_watchdog(engine: Path, label: str, mark: str, text: bytes) -> list[str]:
    """The calls of the engine."""
    command = [sys.executable, "-I", watchdog.__file__, str(engine), label, "1", mark]
    subprocess.run(command, input=text, check=True, timeout=LIMIT_S)
    calls = engine.with_name("calls")
    return calls.read_text().splitlines() if calls.exists() else []


def test_a_launcher_that_ends_by_itself_needs_no_watchdog(
    engine: Path, mark: str, marked: subprocess.Popen[bytes]
) -> None:
    assert run_watchdog(engine, "primus.launcher=1", mark, b"done\n") == []
    assert marked.poll() is None


def test_the_container_and_processes_of_a_killed_launcher_are_stopped(
    engine: Path, mark: str, marked: subprocess.Popen[bytes]
) -> None:
    calls = run_watchdog(engine, "primus.launcher=1", mark, b"")
    assert calls[:3] == ["ps -aq --filter label=primus.launcher=1", "stop -t 1 4f2a", "rm -f 4f2a"]
    assert calls[3:] == ["ps -aq --filter label=primus.launcher=1", "stop -t 0 4f2a", "rm -f 4f2a"]
    assert marked.wait(LIMIT_S) == -signal.SIGKILL


def test_processes_of_other_launchers_are_left_alone(engine: Path, mark: str, marked: subprocess.Popen[bytes]) -> None:
    assert run_watchdog(engine, "", f"{mark}0", b"") == [], "without a label the engine has no containers to stop"
    assert marked.poll() is None

"""A worker's attempt: what the launcher may rely on once it has seen the first heartbeat."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from primus.errors import FinalError, PrimusError
from primus.runs.attempt import STOPPING, Attempt, HeartbeatWriter
from primus.runs.store import Run

WORKER = """
import signal, sys
from primus import worker
from primus.runs.attempt import STOPPING

def note_handlers(event, args):
    if event == "os.rename" and str(args[1]).endswith(".heartbeat.json"):
        handlers = [callable(signal.getsignal(number)) for number in STOPPING]
        print(handlers, file=open(sys.argv[2], "a"))

sys.addaudithook(note_handlers)
worker.main([sys.argv[1], "0"], {})
"""


def test_a_worker_handles_signals_before_its_first_heartbeat(tmp_path: Path) -> None:
    (tmp_path / "run/logs/attempt_0").mkdir(parents=True)
    noted = tmp_path / "noted"
    subprocess.run([sys.executable, "-c", WORKER, tmp_path / "run", noted], timeout=60, check=False)
    assert noted.read_text().splitlines()[0] == "[True, True, True]"


def test_a_heartbeat_follows_each_change_of_the_phase(tmp_path: Path) -> None:
    file = tmp_path / "rank_0.heartbeat.json"
    writer = HeartbeatWriter(file, interval_s=3600)
    for step, phase in enumerate(("compile", "train", "eval", "train")):
        writer.set(phase, step)
        deadline = time.monotonic() + 30
        while (found := json.loads(file.read_text()))["phase"] != phase:
            assert time.monotonic() < deadline, found
        assert found["step"] == step
    writer.close()
    assert json.loads(file.read_text())["phase"] == "exit"


def test_an_unknown_phase_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "logs/attempt_0").mkdir(parents=True)
    attempt = Attempt(Run(tmp_path), 0)
    try:
        with pytest.raises(FinalError, match="beat: unknown phase 'trian'") as caught:
            attempt.beat("trian", 1)
    finally:
        attempt.close()
    assert caught.value.hint == "did you mean 'train'?"


def test_a_signal_ends_what_has_to_stop_at_once_and_only_marks_the_rest(tmp_path: Path) -> None:
    (tmp_path / "logs/attempt_0").mkdir(parents=True)
    before = {number: signal.getsignal(number) for number in STOPPING}
    with closing(Attempt(Run(tmp_path), 0)) as attempt:
        attempt.listen_for_signals()
        try:
            with attempt.stop_at_once():
                pass
            signal.raise_signal(signal.SIGTERM)
            assert attempt.stop_signal == "SIGTERM", "outside of such a body a signal is noted only"
            attempt.stop_signal = None
            reached: list[str] = []
            with pytest.raises(PrimusError, match="interrupted by SIGUSR1"), attempt.stop_at_once():
                reached.append(str(signal.raise_signal(signal.SIGUSR1)))
            with pytest.raises(PrimusError, match="interrupted by SIGUSR1"), attempt.stop_at_once():
                reached.append("the body")
            assert reached == [], "a body that begins after the signal does not run"
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

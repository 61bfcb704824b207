"""A worker's attempt: what the launcher may rely on once it has seen the first heartbeat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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

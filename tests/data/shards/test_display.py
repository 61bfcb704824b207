from __future__ import annotations

import os
import pty
import subprocess
import sys

from primus.data.shards.display import format_progress
from primus.data.shards.workers import ShardProgress

PROGRAM = """
import threading
from primus.data.shards import display
from primus.data.shards.workers import ShardProgress
display.SHOW_EVERY_S = 0
with display.ProgressDisplay() as shown:
    shown.print_line("a line")
    shown.show_progress(ShardProgress("encoding", 200, 50, {"documents": 1234}))
    assert threading.active_count() == 1
"""


def test_a_line_tells_how_far_a_stage_is() -> None:
    progress = ShardProgress("encoding text", 200, 84, {"documents": 12345, "special_strings": 2, "empty": 0})
    assert format_progress(progress, 8.2) == "encoding text: 42 %  12,345 documents  2 special strings  8 s"
    assert format_progress(ShardProgress("encoding text", 0), 0) == "encoding text:  0 s"


def test_progress_is_for_terminals_and_starts_no_thread() -> None:
    terminal, end = pty.openpty()
    done = subprocess.run([sys.executable, "-c", PROGRAM], stderr=end, timeout=60, check=False)
    os.close(end)
    written = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert done.returncode == 0, written
    assert "a line" in written
    assert "encoding: 25 %  1,234 documents" in written
    plain = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert (plain.stdout, plain.stderr) == ("", "a line\n")

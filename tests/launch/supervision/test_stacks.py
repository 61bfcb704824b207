"""What a node records about its ranks before a hanging attempt ends."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from primus.launch.supervision.stacks import inspect_ranks


@pytest.mark.skipif(not Path("/proc/uptime").is_file(), reason="the time of the boot is not known here")
def test_kernel_messages_from_before_the_attempt_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    dmesg = tmp_path / "bin/dmesg"
    dmesg.parent.mkdir()
    lines = [f"[{uptime - 120:.6f}] python invoked oom-killer", f"[{uptime:.6f}] eth0: link down"]
    dmesg.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")
    dmesg.chmod(0o755)
    monkeypatch.setenv("PATH", f"{dmesg.parent}:{os.environ['PATH']}")
    assert inspect_ranks((), tmp_path, 0, time.time() - 60, {}) == ()
    assert (tmp_path / "kernel.node_0.txt").read_text() == f"{lines[1]}\n"

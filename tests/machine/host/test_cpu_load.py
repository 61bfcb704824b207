"""How much of the CPUs other processes use."""

from __future__ import annotations

import os
from pathlib import Path

from primus.machine.host.cpu_load import compute_other_share, read_busy_seconds


def test_the_share_of_others_is_what_the_run_has_not_used_of_the_busy_time(tmp_path: Path) -> None:
    def read_busy(*seconds: int) -> float:
        ticks = " ".join(str(each * os.sysconf("SC_CLK_TCK")) for each in seconds)
        (tmp_path / "stat").write_text(f"cpu  {ticks} 0 0\ncpu0 1 1\n")
        return read_busy_seconds(tmp_path / "stat")

    # user, nice, system, idle, iowait, irq, softirq, steal: idle, waiting and stolen time is nobody's.
    before, after = read_busy(100, 0, 0, 1000, 50, 0, 0, 7), read_busy(108, 1, 2, 9000, 900, 1, 1, 70)
    assert (before, after) == (100, 113)
    assert compute_other_share((5.0, before, 1.0), (15.0, after, 4.0), 4) == (13 - 3) / 40
    assert compute_other_share((5.0, before, 1.0), (15.0, after, 40.0), 4) == 0
    assert compute_other_share((5.0, 0.0, 1.0), (15.0, 0.0, 4.0), 4) is None, "the busy time cannot be read"
    assert read_busy_seconds() > 0

"""How much of this machine's CPUs processes other than this one and its children use."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

CpuTimes = tuple[float, float, float]
"""The clock, the busy time of all CPUs, and the CPU time of this process and its ended children, in seconds."""


def compute_other_share(began: CpuTimes, ended: CpuTimes, num_cpus: int) -> float | None:
    """Share of all CPUs that was used by others, from the clock, the busy and the own time at two moments."""
    wall, busy, own = (end - begin for end, begin in zip(ended, began, strict=True))
    return round(max(0.0, busy - own) / (wall * num_cpus), 4) if busy and wall else None


def read_busy_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Time that all CPUs have worked since the system was started (proc(5)); 0 where it cannot be read."""
    try:
        fields = [int(value) for value in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):  # not Linux
        return 0.0
    user, nice, system, _, _, irq, soft_irq, _ = fields
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def read_cpu_times() -> CpuTimes:
    """The clock, the busy time of all CPUs, and the CPU time of this process and its ended children, in seconds."""
    own = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
    return time.monotonic(), read_busy_seconds(), own

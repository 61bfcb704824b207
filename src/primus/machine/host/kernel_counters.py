"""Counters of the kernel: out-of-memory kills, in this control group and on the whole host; memory; CPU time.

Sources, of Linux: Documentation/admin-guide/cgroup-v2.rst (memory.events, memory.max) and cgroup-v1/memory.rst there
(memory.oom_control, memory.stat), mm/vmstat.c (oom_kill of /proc/vmstat). A container sees its own group at the root of
/sys/fs/cgroup, regardless of the path in /proc/self/cgroup.
"""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path

from msgspec import Struct

CpuTimes = tuple[float, float, float]
"""The clock, the busy time of all CPUs, and the CPU time of this process and its ended children, in seconds."""
GIB, MIB = 2**30, 2**20
NO_LIMIT_BYTES = 2**60
"""Version 1 reports a number near 2^63 for no limit."""


class OomKills(Struct, frozen=True):
    """Counters since the creation of the group and the boot of the host; None if they cannot be read."""

    group: int | None = None
    host: int | None = None
    limit_bytes: int | None = None
    """Limit of the group or of one above it; None without a limit."""


def read_oom_kills(root: Path = Path("/")) -> OomKills:
    """The current counters, from a few small files."""
    host = _read_kill_counter(root / "proc/vmstat")
    places = _list_group_folders(root)
    # Innermost folder first: the group's own counter, not that of a group with other jobs. In each folder the file of
    # version 2 is tried first.
    for place in places:
        for name in ("memory.events", "memory.oom_control"):
            group = _read_kill_counter(place / name)
            if group is not None:
                return OomKills(group, host, _read_memory_limit(places))
    return OomKills(None, host)


def read_free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still use: of the host, and of each control group with a limit; None if not known.

    The page cache of files that are not in use counts as free, as the kernel drops it first.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read_text(root / "proc/meminfo"), re.MULTILINE)
    free = [int(found[1]) * 1024] if found else []
    for place in _list_group_folders(root):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read_text(place / limit_file).strip(), _read_text(place / usage_file).strip()
            if limit.isdecimal() and usage.isdecimal() and int(limit) < NO_LIMIT_BYTES:
                cache = re.search(r"^(?:total_)?inactive_file (\d+)$", _read_text(place / "memory.stat"), re.MULTILINE)
                free.append(max(0, int(limit) - int(usage) + (int(cache[1]) if cache else 0)))
    return min(free, default=None)


def describe_oom(before: OomKills, after: OomKills) -> str:
    """Why a process of this group was killed since `before`; empty if not by the out-of-memory killer.

    The group counts its own kills. The host's counter includes other groups, so it is used only if the group's cannot
    be read.
    """
    if _has_grown(before.group, after.group):
        limit = "" if after.limit_bytes is None else f" of {_format_bytes(after.limit_bytes)}"
        return f"by the kernel's out-of-memory killer: the memory limit{limit} of its container or job was reached"
    if after.group is None and _has_grown(before.host, after.host):
        return "possibly by the kernel's out-of-memory killer, which killed a process on this host in that time"
    return ""


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


def _format_bytes(count: int) -> str:
    return f"{count / GIB:.4g} GiB" if count >= GIB else f"{count / MIB:.4g} MiB"


def _has_grown(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _list_group_folders(root: Path) -> list[Path]:
    """Folders of this process's group and of those above it, in both cgroup versions, innermost first."""
    found: list[Path] = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        bases = ("sys/fs/cgroup", "sys/fs/cgroup/unified") if number == "0" else ("sys/fs/cgroup/memory",)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            found += [root.joinpath(base, *parts[:count]) for count in range(len(parts), -1, -1)]
    return found


def _read_memory_limit(places: list[Path]) -> int | None:
    limits = [int(text) for place in places if (text := _read_text(place / "memory.max").strip()).isdecimal()]
    for place in places:
        match = re.search(r"^hierarchical_memory_limit (\d+)$", _read_text(place / "memory.stat"), re.MULTILINE)
        limits += [int(match[1])] if match else []
    return min((limit for limit in limits if limit < NO_LIMIT_BYTES), default=None)


def _read_kill_counter(path: Path) -> int | None:
    match = re.search(r"^oom_kill (\d+)$", _read_text(path), re.MULTILINE)
    return int(match[1]) if match else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

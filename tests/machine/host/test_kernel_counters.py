"""Processes that the kernel has killed for lack of memory are told from its counters, in both versions of cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primus.machine.host.kernel_counters import (
    OomKills,
    compute_other_share,
    describe_oom,
    read_busy_seconds,
    read_free_memory,
    read_oom_kills,
)

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    cgroup = tmp_path / "sys/fs/cgroup"
    tree(tmp_path, proc__vmstat="oom_kill 7\n", proc__self__cgroup="0::/\n")
    tree(cgroup, **{"memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", "memory.max": "536870912\n"})
    assert read_oom_kills(tmp_path) == OomKills(group=2, host=7, limit_bytes=2**29)


def test_the_limit_may_be_that_of_a_group_above(tmp_path: Path) -> None:
    """As Slurm's: the job has it, and the tasks are in a group of the step below."""
    tree(tmp_path, proc__self__cgroup="0::/slurm/job_1/step_0/user/task_0\n")
    task = tmp_path / "sys/fs/cgroup/slurm/job_1/step_0/user/task_0"
    tree(task, **{"memory.events": "oom_kill 1\n", "memory.max": "max\n"})
    tree(tmp_path / "sys/fs/cgroup/slurm/job_1", **{"memory.max": "1073741824\n"})
    assert read_oom_kills(tmp_path) == OomKills(group=1, host=None, limit_bytes=2**30)


@pytest.mark.parametrize("place", ["sys/fs/cgroup/memory/docker/x", "sys/fs/cgroup/memory"])
def test_version_1_counts_elsewhere(tmp_path: Path, place: str) -> None:
    tree(tmp_path, proc__self__cgroup="9:name=systemd:/\n4:cpu,memory:/docker/x\n0::/\n")
    text = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
    stat = "cache 0\nhierarchical_memory_limit 268435456\nhierarchical_memsw_limit 9223372036854771712\n"
    tree(tmp_path / place, **{"memory.oom_control": text, "memory.stat": stat})
    assert read_oom_kills(tmp_path) == OomKills(group=5, host=None, limit_bytes=2**28)


def test_free_memory_is_that_of_the_host_or_of_the_smallest_group(tmp_path: Path) -> None:
    tree(tmp_path, proc__meminfo="MemTotal: 4096 kB\nMemAvailable:    2048 kB\n", proc__self__cgroup="0::/a/b\n")
    assert read_free_memory(tmp_path) == 2048 * 1024
    limits = {"memory.max": "1000000\n", "memory.current": "900000\n"}
    tree(tmp_path / "sys/fs/cgroup/a", **limits, **{"memory.stat": "anon 5\ninactive_file 50000\n"})
    tree(tmp_path / "sys/fs/cgroup/a/b", **{"memory.max": "max\n", "memory.current": "900000\n"})
    assert read_free_memory(tmp_path) == 150_000
    assert read_free_memory(tmp_path / "none") is None


def test_what_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path) == OomKills()
    assert describe_oom(OomKills(), OomKills(group=3, host=4)) == ""
    assert describe_oom(OomKills(group=1, host=1), OomKills(group=1, host=2)) == "", "another group's process"


def test_the_group_says_more_than_the_host() -> None:
    after = OomKills(group=1, host=9, limit_bytes=3 * 2**29)
    assert "the memory limit of 1.5 GiB of its container" in describe_oom(OomKills(group=0, host=8), after)
    assert describe_oom(OomKills(host=8), OomKills(host=9)).startswith("possibly by the kernel's")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real control group of 300 MiB."""
    base = V1 if (V1 / "memory.limit_in_bytes").exists() else V2
    group = base / f"primus-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if base == V1 else "memory.max")).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_a_real_process_at_its_limit_is_counted(limited: Path) -> None:
    """Its parent is in the group as a launcher is, and reads the counters before and after."""
    script = (
        "import os, subprocess, sys; from pathlib import Path; from primus.machine.host.kernel_counters import *\n"
        "(Path(sys.argv[1]) / 'cgroup.procs').write_text(str(os.getpid()))\n"
        "before = read_oom_kills()\n"
        "done = subprocess.run([sys.executable, '-c', 'x = bytearray(900 << 20)'])\n"
        "print(done.returncode, describe_oom(before, read_oom_kills()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(limited)], capture_output=True, text=True, timeout=60)
    expected = (
        "-9 by the kernel's out-of-memory killer: the memory limit of 300 MiB of its container or job was reached"
    )
    assert done.stdout.strip() == expected, done.stderr


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

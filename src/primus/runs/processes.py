"""The process of a rank, found by its heartbeat and in /proc."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from primus.errors import PrimusError, UsageError
from primus.runs.attempt import HEARTBEAT_INTERVAL_S, heartbeat_file
from primus.runs.files import read_json
from primus.runs.store import Run

WORKER = "primus.worker"
ROCPROF_ATTACH = "ROCP_TOOL_ATTACH"
"""Variable with which rocprofv3 can attach to a process (rocprofiler-sdk, "Using rocprofv3 to attach")."""
NSYS_SESSION = "PRIMUS_NSYS_SESSION"
"""Variable of a process below `nsys launch`: the name of its session."""
STALE_S = 10 * HEARTBEAT_INTERVAL_S
"""Age of a heartbeat from which its process is taken for dead. A live one may miss a few: its thread shares the
interpreter with the training, and the file may lie on a slow shared file system."""


class WorkerProcess(Struct, frozen=True, kw_only=True):
    """A live worker on this host."""

    pid: int
    """As this process sees it: in a container, the worker itself has another one."""
    rank: int
    attempt: int


def find_worker_process(run: Run, rank: int, host: str, proc: Path = Path("/proc")) -> WorkerProcess:
    """The Python process of a rank: never a shell, a launcher or an agent above it.

    Args:
        run: The run.
        rank: The rank.
        host: Name of this host.
        proc: The proc file system.

    Raises:
        UsageError: The rank does not exist, has ended, or runs on another host.
    """
    attempt, beat = _read_heartbeat(run, rank)
    age = time.time() - float(beat.get("time", 0.0))
    if beat.get("phase") == "exit" or age > STALE_S:
        raise UsageError(
            f"rank {rank} of {run.id} does not run: its last heartbeat is {age:,.0f} s old",
            "give a run that is training",
        )
    # The name of a container may differ from that of its host, which sees its processes.
    found = [
        pid for pid in _list_pids(proc) if _is_worker(proc / str(pid), run, rank) and _has_pid(proc, pid, beat["pid"])
    ]
    if len(found) == 1:
        return WorkerProcess(pid=found[0], rank=rank, attempt=attempt)
    where = f"rank {rank} of {run.id} runs on {beat.get('host')}, as process {beat.get('pid')}"
    if beat.get("host") != host:
        raise UsageError(f"{where}; this is {host}", f"run this command on {beat.get('host')}")
    raise UsageError(
        f"{where}, which is not visible here", "run this command in the container of the worker, or as root"
    )


def read_process_environ(pid: int, proc: Path = Path("/proc")) -> Mapping[str, str] | None:
    """The variables with which a process was started; None for a process of another user."""
    try:
        text = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    words = (word.partition(b"=") for word in text.split(b"\0") if word)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in words}


def _read_heartbeat(run: Run, rank: int) -> tuple[int, dict[str, Any]]:
    """The number of the newest attempt in which the rank ran, and its heartbeat."""
    folders = {int(path.name.partition("_")[2]): path for path in run.directory.glob("logs/attempt_*")}
    for number in sorted(folders, reverse=True):
        path = heartbeat_file(folders[number], rank)
        if path.is_file():
            try:
                return number, read_json(path, dict)
            except PrimusError:
                break
        ranks = sorted(
            int(file.name.split("_")[1].partition(".")[0]) for file in folders[number].glob("rank_*.heartbeat.json")
        )
        if ranks:
            raise UsageError(f"{run.id} has no rank {rank}", f"its ranks are {ranks[0]} to {ranks[-1]}")
    raise UsageError(f"{run.id} has no worker: no rank has written a heartbeat", "give a run that is training")


def _list_pids(proc: Path) -> Iterator[int]:
    return (int(path.name) for path in proc.iterdir() if path.name.isdigit())


def _is_worker(folder: Path, run: Run, rank: int) -> bool:
    """Whether a process is Python with the module `primus.worker`; above it are its agent, launcher and shells."""
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        executable = (folder / "exe").readlink().name
    except OSError:
        return False
    # `primus.interpreter.build_module_command`: the agent has its own module first, and that of the worker behind it.
    module = next((word for word in words if word.startswith("primus.")), "")
    if module != WORKER or not executable.startswith("python"):
        return False
    # The path of the run may differ in a container; its name does not.
    if not any(Path(word).name == run.directory.name for word in words):
        return False
    environ = read_process_environ(int(folder.name), folder.parent)
    return environ is None or environ.get("RANK", "0") == str(rank)


def _has_pid(proc: Path, pid: int, own: int) -> bool:
    """Whether a process has `own` as its id in its own PID namespace (proc(5), NSpid)."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return False
    ids = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [str(pid)])
    return bool(ids) and ids[-1] == str(own)

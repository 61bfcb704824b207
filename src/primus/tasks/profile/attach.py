"""Profile a rank while it trains, with rocprofv3, nsys or py-spy; the result goes to the run folder."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from primus.config.flags import PositionalRun
from primus.errors import PrimusError, UnfitError, UsageError
from primus.process import run_command
from primus.runs import store
from primus.runs.events import EventLog
from primus.runs.processes import (
    NSYS_SESSION,
    ROCPROF_ATTACH,
    WorkerProcess,
    find_worker_process,
    read_process_environ,
)
from primus.runs.store import Run
from primus.task import TaskContext

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
PATIENCE_S = 120.0
"""Time that a tool may take beyond the recording, to attach and to write."""
SYNC_OUTPUT = "--attach-sync-output"
INSTALL = {
    "rocprofv3": "it is a part of ROCm 7 (rocprofiler-sdk); use an image of ROCm, or add /opt/rocm/bin to PATH",
    "nsys": "install Nsight Systems, or use an image of NVIDIA that has it",
    "py-spy": "pip install py-spy",
}


class Options(Struct, frozen=True, kw_only=True):
    """Options of `profile attach`."""

    run: PositionalRun
    """Active run: folder, id or its beginning, or name of an experiment (its newest run)."""
    tool: Annotated[Literal["rocprofv3", "nsys", "py-spy"], Meta(extra={"aliases": ("--with",)})] = "py-spy"
    """Profiler: rocprofv3 for kernels of AMD GPUs, nsys for NVIDIA GPUs, py-spy for Python."""
    rank: Annotated[int, Meta(ge=0)] = 0
    """Rank to profile; it must run on this host."""
    seconds: Annotated[float, Meta(gt=0)] = 10.0
    """How long to record."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def run(options: Options, context: TaskContext) -> None:
    """Profile the rank.

    Raises:
        UsageError: The run or the rank does not exist, or does not run here.
        UnfitError: The tool is missing, or may not attach.
        PrimusError: The tool failed, or recorded nothing.
    """
    found = store.find_run(options.run, Path(options.workspace))
    worker = find_worker_process(found, options.rank, socket.gethostname())
    tool = _find_tool(options.tool, context.environ)
    _check_permission(worker, options.tool)
    context.say(f"{options.tool} attaches to process {worker.pid}, rank {worker.rank}, for {options.seconds:g} s")
    files = _record(found, worker, tool, options)
    log = EventLog(found.events)
    log.append("profile_attached", rank=worker.rank, attempt=worker.attempt, tool=options.tool, files=files)
    log.close()
    value = {"run": str(found.directory), "rank": worker.rank, "pid": worker.pid, "files": files}
    context.result(value, "\n".join(str(found.directory / file) for file in files))


def _find_tool(name: str, environ: Mapping[str, str]) -> str:
    # py-spy is a package: it may be in the environment of this Python, which need not be on the PATH.
    path = os.pathsep.join([environ.get("PATH", ""), str(Path(sys.executable).parent), "/opt/rocm/bin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise UnfitError(f"{name} is not on the PATH", INSTALL[name])
    return found


def _check_permission(worker: WorkerProcess, tool: str) -> None:
    """Check what attaching needs before the tool fails in its own words."""
    environ = read_process_environ(worker.pid)
    if environ is None:
        raise UnfitError(
            f"process {worker.pid} of rank {worker.rank} belongs to another user",
            "run this command as that user, or root",
        )
    if tool == "nsys":
        return  # it does not trace: the worker must have been started by it
    if tool == "rocprofv3" and environ.get(ROCPROF_ATTACH) != "1":
        raise UnfitError(
            f"rank {worker.rank} was started without {ROCPROF_ATTACH}=1, which rocprofv3 needs to attach",
            "start the run with: direct --attachable rocprofv3",
        )
    scope = PTRACE_SCOPE.read_text().strip() if PTRACE_SCOPE.is_file() else "0"
    if scope != "0" and os.geteuid() != 0:
        raise UnfitError(
            f"the kernel lets a process trace its own children only (kernel.yama.ptrace_scope is {scope})",
            "run this command as root, or set: sysctl kernel.yama.ptrace_scope=0",
        )


def _record(run: Run, worker: WorkerProcess, tool: str, options: Options) -> list[str]:
    """Record to a temporary folder, then rename it; gives the files, relative to the run folder."""
    parent = run.directory / "profiles" / f"attempt_{worker.attempt}"
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / f"rank_{worker.rank}.{options.tool}.{time.strftime('%H%M%S')}"
    with tempfile.TemporaryDirectory(dir=parent, prefix=".partial-") as name:
        folder = Path(name) / "result"
        folder.mkdir()
        problem = _run_tool(worker, tool, options, folder)
        if not any(path.is_file() and path.stat().st_size for path in folder.rglob("*")):
            raise PrimusError(
                f"{options.tool} recorded nothing of process {worker.pid}{f': {problem}' if problem else ''}",
                "check that the rank makes progress (runs show), and record for longer: --seconds 30",
            )
        folder.rename(final)
    return sorted(str(path.relative_to(run.directory)) for path in final.rglob("*") if path.is_file())


def _run_tool(worker: WorkerProcess, tool: str, options: Options, folder: Path) -> str:
    """Run the tool; gives the reason if it fails."""
    seconds, limit = options.seconds, options.seconds + PATIENCE_S
    pid = str(worker.pid)
    if options.tool == "py-spy":
        # speedscope.app opens this format.
        words = ["record", "--pid", pid, "--duration", f"{max(1, round(seconds))}", "--format", "speedscope"]
        return run_command([tool, *words, "--output", str(folder / "stacks.speedscope.json")], limit_s=limit).problem
    if options.tool == "rocprofv3":
        # rocm.docs.amd.com, rocprofiler-sdk: "Using rocprofv3 to attach to a running process".
        words = ["--attach", pid, "--attach-duration-msec", f"{seconds * 1000:.0f}", "--kernel-trace"]
        # Since ROCm 7.14 files are complete when the tool returns only with this option; older ones refuse it.
        if SYNC_OUTPUT in run_command([tool, "--help"], limit_s=30).text:
            words.append(SYNC_OUTPUT)
        return run_command([tool, *words, "-d", str(folder), "--output-format", "pftrace"], limit_s=limit).problem
    return _run_nsys(tool, _find_nsys_session(tool, worker), seconds, folder)


def _find_nsys_session(tool: str, worker: WorkerProcess) -> str:
    """The session below which the worker runs, or the newest one if the user has launched the whole command."""
    known = (read_process_environ(worker.pid) or {}).get(NSYS_SESSION)
    if known:
        return known
    listed = run_command([tool, "sessions", "list"], limit_s=30)
    sessions = [words for words in map(str.split, listed.text.splitlines()) if words and words[0].isdigit()]
    if not sessions:
        raise UsageError(
            f"nsys attaches only to processes that it has launched, and rank {worker.rank} is not one of them",
            "start the run with: direct --attachable nsys; or record steps with train --profile steps=5:8",
        )
    return sessions[-1][-1]


def _run_nsys(tool: str, name: str, seconds: float, folder: Path) -> str:
    """Start and stop a collection of a session."""
    started = run_command(
        [tool, "start", f"--session={name}", f"--output={folder / 'report'}", "--sample=none"], limit_s=60
    )
    if started.state != "ok":
        return started.problem
    time.sleep(seconds)
    return run_command([tool, "stop", f"--session={name}"], limit_s=PATIENCE_S).problem

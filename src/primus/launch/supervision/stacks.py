"""Inspects hanging ranks before any is killed: stacks, flight recorder, devices, kernel messages.

Everything runs in parallel within `attempt_monitor.INSPECTION_LIMIT_S`, and nothing here may fail: a hung GPU driver
also blocks the tools that would show it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import structs

from primus import process
from primus.diagnosis.kernel_log import read_kernel_log
from primus.launch.supervision.flight_recorder import PIPE_VARIABLE
from primus.launch.supervision.hang_detector import RankStatus
from primus.runs.attempt import process_state, stacks_file
from primus.runs.files import write_text

DUMP_LIMIT_S = 10.0
"""Time for py-spy, which reads symbols of large libraries the first time."""
FAULTHANDLER_LIMIT_S = 2.0
"""Time that a rank has to write its own stacks, from a signal handler in C."""
TOOL_LIMIT_S = 10.0
"""Time for a device tool: it may block on the driver indefinitely."""
TOOLS = ("amd-smi", "rocm-smi", "nvidia-smi")
"""Tools that print the state of the devices; the first that is installed runs."""
NUM_KERNEL_LINES = 100
CLOCKS_S = 5.0
"""Difference between the clocks of the kernel log and of the launcher."""
NUM_FRAMES = 12
"""Innermost frames in which a collective is searched."""
WAITS = re.compile(
    r"distributed_c10d|_functional_collectives|torch/distributed/|all_reduce|all_gather|reduce_scatter|all_to_all"
    r"|\bbarrier\b|broadcast|_engine_run_backward|\bsynchronize\b"
)
"""Frames of a main thread that waits for other ranks: PyTorch's collectives, and a backward pass that contains them."""


def inspect_ranks(
    statuses: Sequence[RankStatus], folder: Path, node_rank: int, began: float, environ: Mapping[str, str]
) -> tuple[RankStatus, ...]:
    """Write stacks and device state of this node to the folder of the attempt; gives the statuses with stack frames.

    Args:
        statuses: Of the ranks of this node.
        folder: Of the attempt.
        node_rank: Number of this node.
        began: When the attempt began, in seconds since the epoch.
        environ: Variables of the ranks.
    """
    jobs: list[Callable[[], object]] = [
        lambda: _write_device_state(folder / f"devices.node_{node_rank}.txt", environ),
        lambda: _write_kernel_messages(folder / f"kernel.node_{node_rank}.txt", began),
    ]
    # First, and without waiting: the ranks write their dumps while stacks are read.
    _request_flight_records(statuses, environ)
    with ThreadPoolExecutor(max_workers=len(statuses) + len(jobs)) as pool:
        others = [pool.submit(job) for job in jobs]
        found = list(pool.map(lambda each: _inspect_rank(each, folder, environ), statuses))
        for other in others:
            other.result()
    return tuple(found)


def _inspect_rank(status: RankStatus, folder: Path, environ: Mapping[str, str]) -> RankStatus:
    if not status.pid:
        return status
    state = process_state(status.pid)
    # py-spy first: SIGUSR2 needs a process that runs, and may interrupt a system call of the rank.
    text = _dump_stacks(status.pid, environ)
    file = stacks_file(folder, status.rank)
    if text:
        with contextlib.suppress(OSError), file.open("a", encoding="utf-8") as out:
            out.write(text)
    else:
        text = _request_stacks(status.pid, file)
    frames = find_main_frames(text)
    waits = any(WAITS.search(frame) for frame in frames) if frames else None
    return structs.replace(status, state=state, waits=waits, frame=frames[0] if frames else "")


def _dump_stacks(pid: int, environ: Mapping[str, str]) -> str:
    """The stacks by py-spy, which needs the right to trace the rank, but no help of the rank."""
    own = Path(sys.executable).with_name("py-spy")
    program = shutil.which("py-spy", path=environ.get("PATH")) or (str(own) if own.is_file() else None)
    if program is None:
        return ""
    argv = [program, "dump", "--nonblocking", "--pid", str(pid)]
    return process.run_command(argv, limit_s=DUMP_LIMIT_S).text


def _request_stacks(pid: int, file: Path) -> str:
    """The stacks that the rank writes itself on SIGUSR2 (faulthandler), as far as it has written them in time."""
    before = _read_file_size(file)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGUSR2)
    deadline, last = time.monotonic() + FAULTHANDLER_LIMIT_S, before
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = _read_file_size(file)
        if now > before and now == last:  # it has stopped growing
            break
        last = now
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_file_size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def find_main_frames(text: str) -> list[str]:
    """Innermost frames of the main thread, from the output of py-spy or faulthandler, without line numbers."""
    threads = re.split(r"\n(?=Thread |Current thread )", "\n" + text)
    main_threads = [each for each in threads if '"MainThread"' in each] or [threads[-1]]
    lines = [line.strip() for line in main_threads[-1].strip().splitlines()[1:]]
    frames = [
        re.sub(r":\d+\)$", ")", re.sub(r'^File "(.*)", line \d+ in (.*)$', r"\2 (\1)", line)) for line in lines if line
    ]
    return [frame for frame in frames if "(" in frame][:NUM_FRAMES]


def _request_flight_records(statuses: Sequence[RankStatus], environ: Mapping[str, str]) -> None:
    """Ask the flight recorders of PyTorch for their dumps: any byte in a rank's pipe does (ProcessGroupNCCL.hpp)."""
    prefix = environ.get(PIPE_VARIABLE)
    for each in statuses if prefix else ():
        with contextlib.suppress(OSError):
            # Non-blocking: opening a pipe that no recorder reads would wait for one.
            pipe = os.open(f"{prefix}{each.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b"1\n")
            os.close(pipe)


def _write_device_state(file: Path, environ: Mapping[str, str]) -> None:
    for tool in TOOLS:
        answer = process.run_command([tool], environ=environ, limit_s=TOOL_LIMIT_S)
        if answer.state != "missing":  # a tool that fails or blocks is also a finding
            return write_text(file, answer.text or answer.problem + "\n")
    return None


def _write_kernel_messages(file: Path, began: float) -> None:
    """The last kernel messages of the attempt, if this user may read them; earlier ones are of something else."""
    messages, _ = read_kernel_log(began - CLOCKS_S)
    if messages:
        write_text(file, "\n".join(messages.decode("utf-8", "replace").splitlines()[-NUM_KERNEL_LINES:]) + "\n")

"""Finds the logs of an attempt, and the time from which their lines belong to it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import msgspec

from primus.diagnosis import logs
from primus.diagnosis.logs import LogFile
from primus.errors import PrimusError
from primus.runs.store import Run

CLOCKS_S = 5.0
"""Tolerated difference between the clocks of nodes."""
LOG_SUFFIXES = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", *logs.COMPRESSED)
_ATTEMPT_BEGAN = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\] attempt (\d+) on ", re.MULTILINE)


def find_newest_attempt(run: Run) -> int:
    """Number of the newest attempt with a log folder."""
    names = [path.name.partition("_")[2] for path in (run.directory / "logs").glob("attempt_*") if path.is_dir()]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def find_attempt_logs(run: Run, number: int, began: float | None) -> list[LogFile]:
    """Logs of an attempt: of its ranks, of its launchers, and what a scheduler wrote into the run folder."""
    folder = run.attempt_folder(number)
    found = [
        _find_attempt_log(run, path, began) for path in sorted(folder.glob("*")) if path.suffix in (".log", ".txt")
    ]
    per_node = _read_processes_per_node(run)
    place = run.directory / "logs"
    others = [path for pattern in ("*", "ssh/*", "slurm/*", "k8s/*") for path in sorted(place.glob(pattern))]
    for path in others:
        if path.is_symlink() or not path.is_file() or not path.name.endswith(LOG_SUFFIXES):
            continue
        found.append(
            LogFile(
                name=str(path.relative_to(run.directory)),
                path=path,
                attempt=number,
                local_to_rank=logs.parse_node_of_path(path) * per_node,
                since=find_attempt_start(number, began),
            )
        )
    return [log for log in found if log is not None]


def _find_attempt_log(run: Run, path: Path, began: float | None) -> LogFile | None:
    if path.name.endswith(".stacks.txt") or path.name.startswith("devices."):
        return None
    is_kernel = path.name.startswith("kernel.")
    return LogFile(
        name=str(path.relative_to(run.directory)),
        path=path,
        rank=logs.parse_rank_of_path(path),
        is_kernel=is_kernel,
        since=began - CLOCKS_S if is_kernel and began is not None else None,
    )


def _read_processes_per_node(run: Run) -> int:
    try:
        plan: Any = msgspec.json.decode((run.directory / "plan.json").read_bytes())
        return int(plan["layout"]["nproc"])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        return 0  # the local rank is shown instead of the rank


def find_attempt_start(number: int, began: float | None) -> float | None:
    """The time before which lines belong to earlier attempts."""
    return began - CLOCKS_S if began is not None and number > 0 else None


def read_attempt_begin(run: Run, number: int) -> float | None:
    """When the attempt began, by the launcher's log."""
    try:
        data = (run.directory / "logs" / "launch.log").read_bytes()
    except OSError:
        return None
    times = {
        int(found[2]): time.mktime(time.strptime(found[1].decode(), "%Y-%m-%d %H:%M:%S"))
        for found in _ATTEMPT_BEGAN.finditer(data)
    }
    return times.get(number)


def read_recorded_reason(run: Run, number: int) -> list[LogFile]:
    """The reason in the run's metadata, if this attempt was its last."""
    try:
        outcome = run.read_metadata().outcome
    except PrimusError:  # it is missing or damaged: the logs remain
        return []
    if outcome.state != "failed" or not outcome.reason or number != find_newest_attempt(run):
        return []
    first = outcome.first_failure
    return [
        LogFile(
            name="metadata.json",
            data=outcome.reason.encode("utf-8", "replace"),
            rank=first.rank if first else None,
            host=first.host if first else None,
            time=first.time if first else None,
        )
    ]


def find_folder_logs(folder: Path) -> list[Path]:
    """Logs of a folder and its subfolders."""
    found = [path for path in sorted(folder.rglob("*")) if path.name.endswith(LOG_SUFFIXES) and path.is_file()]
    real = [path for path in found if not path.is_symlink()]  # logs/rank_0.log may only point to another
    targets = {path.resolve() for path in real}
    return [*real, *(path for path in found if path.is_symlink() and path.resolve() not in targets)]

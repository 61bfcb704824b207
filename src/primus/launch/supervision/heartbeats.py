"""Heartbeats and errors that the ranks of this node write to the folder of the attempt.

A heartbeat file is replaced once a second while its rank lives; its last phase is `exit`. A rank that fails writes its
error file first. Only the rank itself writes these files; the launcher adds the error of a rank that could not.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from primus.machine.cluster import find_node_name
from primus.runs.attempt import heartbeat_file
from primus.runs.store import RankFailure


class RankHeartbeat(Struct, frozen=True, kw_only=True):
    """Content of a heartbeat file."""

    pid: int
    host: str
    launcher: int = 0
    """Process of the launcher, which started the rank directly or by an agent."""
    local_rank: int = 0
    phase: str
    step: int
    progress_time: float
    """Changes whenever the rank makes progress."""
    step_time_s: float | None = None
    compute_time_s: float | None = None
    """The rank's own computing in the last step, without waiting for others."""


def read_own_heartbeats(folder: Path, expected: Collection[int] = ()) -> dict[int, RankHeartbeat]:
    """Heartbeats of the ranks that this process started, on this host.

    Other files are skipped: nodes may share the folder, and after a killed launcher its files remain.

    Args:
        folder: Folder of the attempt.
        expected: Ranks to read; all without any.
    """
    host, launcher, found = find_node_name(), os.getpid(), {}
    files = [heartbeat_file(folder, rank) for rank in expected] or folder.glob(heartbeat_file(folder, "*").name)
    for path in files:
        # A rank may replace the file, or end, while it is read: the next look is a second later.
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            heartbeat = msgspec.json.decode(path.read_bytes(), type=RankHeartbeat)
            # The launcher's pid also tells a file of this attempt from one that a killed launcher has left.
            if heartbeat.host == host and heartbeat.launcher == launcher:
                found[int(path.name.partition("_")[2].partition(".")[0])] = heartbeat
    return found


def read_failures(folder: Path, ranks: Iterable[int]) -> list[RankFailure]:
    """Errors that these ranks of an attempt wrote, the first one first."""
    found = []
    for rank in ranks:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode((folder / f"rank_{rank}.error.json").read_bytes(), type=RankFailure))
    return sort_failures(found)


def sort_failures(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """`failures` in the order in which they happened."""
    return sorted(failures, key=lambda failure: (failure.time, failure.rank))


def signal_ranks(heartbeats: Mapping[int, RankHeartbeat], number: int) -> None:
    """Send a signal to the ranks that are at work; in place of SIGHUP, which ranks do not handle, SIGTERM."""
    number = signal.SIGTERM if number == signal.SIGHUP else number
    for heartbeat in heartbeats.values():
        if heartbeat.phase != "exit":  # its process may have ended, and another one may have its number
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(heartbeat.pid, signal.Signals(number))

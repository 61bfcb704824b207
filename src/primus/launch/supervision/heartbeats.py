"""The workers of this node, by what their heartbeats say."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from primus.runs.attempt import heartbeat_file
from primus.runs.store import RankFailure


class RankHeartbeat(Struct, frozen=True, kw_only=True):
    """What a heartbeat file says."""

    pid: int
    host: str
    launcher: int = 0
    """Process that has started the rank, directly or by an agent."""
    local_rank: int = 0
    phase: str
    step: int
    progress_time: float
    """Changes whenever the rank gets on."""
    step_time_s: float | None = None
    compute_time_s: float | None = None
    """Its own computing of the last step, without waiting for others."""


def read_own_heartbeats(folder: Path, expected: Collection[int] = ()) -> dict[int, RankHeartbeat]:
    """The ranks of an attempt that this process has started, on this host.

    Args:
        folder: Folder of the attempt, which the ranks of other nodes may share.
        expected: Ranks that are looked for; all without any.
    """
    host, launcher, found = socket.gethostname(), os.getpid(), {}
    files = [heartbeat_file(folder, rank) for rank in expected] or folder.glob(heartbeat_file(folder, "*").name)
    for path in files:
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            beat = msgspec.json.decode(path.read_bytes(), type=RankHeartbeat)
            if beat.host == host and beat.launcher == launcher:
                found[int(path.name.partition("_")[2].partition(".")[0])] = beat
    return found


def read_failures(folder: Path, of: Iterable[int]) -> list[RankFailure]:
    """What these ranks of an attempt say of their failure, the first one first."""
    found = []
    for rank in of:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode((folder / f"rank_{rank}.error.json").read_bytes(), type=RankFailure))
    return sort_failures(found)


def sort_failures(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """`failures` in the order in which they happened."""
    return sorted(failures, key=lambda failure: (failure.time, failure.rank))


def signal_ranks(beats: Mapping[int, RankHeartbeat], number: int) -> None:
    """Send a signal to the ranks that are at work; in place of SIGHUP, which ranks do not handle, SIGTERM."""
    number = signal.SIGTERM if number == signal.SIGHUP else number
    for beat in beats.values():
        if beat.phase != "exit":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.Signals(number))

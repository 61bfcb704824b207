"""The lock of a run folder: which process executes the run, on this host or on another one that sees the folder.

flock(2) decides among the processes of one kernel, and ends with its holder however that dies. Many shared file systems
keep it to one host (Lustre without `-o flock`, NFS with `local_lock`), so the holder also writes a record into the
lock file, which it renews every few seconds and empties when it ends in order. States of that record:

    empty                          the run is not executing
    of this host                   ignored: flock decides
    of another host, renewed       the run is executing there
    of another host, not renewed   its holder has died
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec
from msgspec import Struct

from primus.errors import PrimusError, find_owner

if TYPE_CHECKING:
    import threading

FILE = ".lock"
RENEWAL_S = 2.0
STALE_S = 300.0
"""Age from which the record of another host is stale; generous, because clocks of hosts may differ by minutes."""
WATCH_S = 10.0
"""Time to watch a record for a renewal: five renewals, since network file systems cache attributes for at least 3 s
(nfs(5), acregmin)."""
POLL_S = 0.25
RECORD_BYTES = 512
"""Every record has this size, padded with blanks, so that one write replaces it: readers see the old or the new."""


class LockHolder(Struct, frozen=True, kw_only=True):
    """The record in a lock file."""

    host: str
    pid: int
    renewal: int = 0
    """Counts up, so that a reader needs no clock that agrees with the writer's."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextlib.contextmanager
def hold_run(directory: Path) -> Iterator[bool]:
    """Hold the run while it executes; gives False if another process of this host holds it.

    The record is written while flock is held, and emptied before the lock is released.

    Raises:
        PrimusError: This user may not execute the run.
    """
    try:
        descriptor = os.open(directory / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        owner = find_owner(directory)
        raise PrimusError(
            f"{directory} belongs to {owner}, and you may not change it",
            f"start a run of your own, or ask {owner} for write permission of your group (umask 002)",
        ) from None
    with os.fdopen(descriptor, "r+") as file:
        if not lock_file(file, fcntl.LOCK_EX):
            yield False
            return
        import threading  # only by a process that executes a run

        # The thread renews the record while the main thread blocks in hooks or waits for workers.
        over = threading.Event()
        renewing = threading.Thread(target=_renew_record, args=(file.fileno(), over), name="run-lock", daemon=True)
        # Written before the thread starts, so that another host sees the holder at once.
        _write_record(file.fileno(), renewal=0)
        renewing.start()
        try:
            yield True
        finally:
            over.set()
            # Joined first: a renewal after the truncation would leave the record of an ended holder.
            renewing.join()
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), 0)


def may_execute(directory: Path) -> bool:
    """Whether this user may change a run: its folder, its lock and its record."""
    needed = [directory, *(path for name in (FILE, "events.jsonl") if (path := directory / name).exists())]
    return all(os.access(path, os.W_OK) for path in needed)


START_LOCKS = ".start.*.lock"
"""Files of `hold_workspace` in a workspace, one for each user."""


@contextlib.contextmanager
def hold_workspace(workspace: Path) -> Iterator[None]:
    """Keep other commands of this user from starting a run in `workspace` while open, for the time of a few files.

    A file system without locks, or a folder that cannot be written, gives no protection, and no error.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            workspace.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((workspace / f".start.{os.getuid()}.lock").open("w"))  # others may not open it
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_holder(directory: Path) -> LockHolder | None:
    """The process that executes the run; changes nothing and does not wait.

    For `STALE_S` after its death a holder on another host is still returned: `is_renewed` distinguishes the two.
    """
    path = directory / FILE
    record = read_record(path)
    try:
        with path.open() as file:
            # A shared lock, so that several readers do not see each other as holders. One try, because the caller does
            # not wait.
            if not lock_file(file, fcntl.LOCK_SH, tries=1):
                return record or LockHolder(host=os.uname().nodename, pid=0)
            # The clock of a file server may be ahead of this host's, so the sign of the age means nothing.
            age_s = abs(time.time() - os.fstat(file.fileno()).st_mtime)
    except OSError:
        return None
    is_elsewhere = record is not None and record.host != os.uname().nodename
    return record if is_elsewhere and age_s < STALE_S else None


def is_renewed(directory: Path, holder: LockHolder) -> bool:
    """Whether `holder`, on another host, is alive: waits up to `WATCH_S` for a renewal of its record."""
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        record = read_record(directory / FILE)
        # The holder has ended in order: it empties the record before it releases the lock.
        if record is None:
            return False
        if record != holder:
            return True
        time.sleep(POLL_S)
    return False


def is_held_here(directory: Path) -> bool:
    """Whether a process of this host executes the run."""
    holder = find_holder(directory)
    return holder is not None and holder.host == os.uname().nodename


def read_record(path: Path) -> LockHolder | None:
    """The record of a lock file; opening the file each time makes NFS ask its server (nfs(5), close-to-open)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LockHolder)
    except (OSError, msgspec.MsgspecError):
        return None


def _renew_record(file: int, over: threading.Event) -> None:
    renewal = 0
    while not over.wait(RENEWAL_S):
        renewal += 1
        _write_record(file, renewal)


def _write_record(file: int, renewal: int) -> None:
    """Replace the record in place by one call; a rename would replace the locked file, and lose the lock."""
    record = LockHolder(host=os.uname().nodename, pid=os.getpid(), renewal=renewal)
    # Host and process id are constant; only the counter changes, which shows a reader that the holder is alive.
    with contextlib.suppress(OSError):  # a full disk: flock alone protects the run
        os.pwrite(file, msgspec.json.encode(record).ljust(RECORD_BYTES), 0)


def lock_file(file: TextIO, kind: int, tries: int = 10) -> bool:
    """Lock `file` until it is closed; gives False if another process holds it.

    It retries, because readers hold a shared lock for a moment.
    """
    for _ in range(tries):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.02)
    return False

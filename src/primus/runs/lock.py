"""The lock of a run folder: which process executes the run, on this host or on another one that sees the folder.

flock(2) decides among the processes of one kernel, and ends with its holder however that dies. Many shared file systems
keep it to one host (Lustre without `-o flock`, NFS with `local_lock`), so the holder also writes a record into the
lock file, which it renews every few seconds and empties when it ends in order. States of that record:

    empty                          nobody executes the run, or never did
    of this host                   says nothing: flock knows better
    of another host, renewed       the run is executed there
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

if TYPE_CHECKING:
    import threading

FILE = ".lock"
RENEWAL_S = 2.0
STALE_S = 300.0
"""Age at which a record of another host counts as left by the dead; the clocks of hosts may differ by minutes."""
WATCH_S = 10.0
"""Time that a record is watched for a renewal: five renewals, since network file systems cache attributes for 3 s
(nfs(5), acregmin)."""
POLL_S = 0.25
RECORD_BYTES = 512
"""Every record has this size, blanks at its end, so that a reader finds the old one or the new one."""


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
    """Hold the run while it is being executed; gives False where another process of this host holds it."""
    with os.fdopen(os.open(directory / FILE, os.O_RDWR | os.O_CREAT, 0o666), "r+") as file:
        if not _lock_file(file, fcntl.LOCK_EX):
            yield False
            return
        import threading  # only by a process that executes a run

        over = threading.Event()
        renewing = threading.Thread(target=_renew_record, args=(file.fileno(), over), name="run-lock", daemon=True)
        _write_record(file.fileno(), renewal=0)
        renewing.start()
        try:
            yield True
        finally:
            over.set()
            renewing.join()
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), 0)


def find_holder(directory: Path) -> LockHolder | None:
    """Who executes the run now, as far as files tell at a glance; changes nothing and does not wait.

    A holder on another host that has died in the last minutes is still given.
    """
    path = directory / FILE
    record = read_record(path)
    try:
        with path.open() as file:
            if not _lock_file(file, fcntl.LOCK_SH, tries=1):
                return record or LockHolder(host=os.uname().nodename, pid=0)
            age_s = abs(time.time() - os.fstat(file.fileno()).st_mtime)
    except OSError:
        return None
    is_elsewhere = record is not None and record.host != os.uname().nodename
    return record if is_elsewhere and age_s < STALE_S else None


def is_renewed(directory: Path, holder: LockHolder) -> bool:
    """Whether `holder`, of another host, lives: waits up to `WATCH_S` for a renewal of its record."""
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        record = read_record(directory / FILE)
        if record is None:
            return False
        if record != holder:
            return True
        time.sleep(POLL_S)
    return False


def read_record(path: Path) -> LockHolder | None:
    """The record of a lock file; opened anew each time, which is when NFS asks its server (nfs(5), close-to-open)."""
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
    """Replace the record in place, all of it by one call: a rename would take the lock away, which is the file's."""
    record = LockHolder(host=os.uname().nodename, pid=os.getpid(), renewal=renewal)
    with contextlib.suppress(OSError):  # a full disk: flock alone has to do
        os.pwrite(file, msgspec.json.encode(record).ljust(RECORD_BYTES), 0)


def _lock_file(file: TextIO, kind: int, tries: int = 10) -> bool:
    """Lock `file` until it is closed; a few tries, since who only asks whether it is locked holds it for a moment."""
    for _ in range(tries):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.02)
    return False

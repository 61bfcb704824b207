"""Write files atomically (temporary name, sync, rename), and lock files between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from primus.errors import PrimusError

POLL_S = 0.1
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def build_temporary_path(path: Path) -> Path:
    """Name beside `path` for its content while it is being written."""
    return path.with_name(f"{path.name}.tmp.{os.getpid()}")


def remove_stale(folder: Path, name: str) -> None:
    """Delete what killed writers left of the files ``NAME.*``; call it with the lock held."""
    for file in folder.glob("*.tmp.*"):
        if file.name.startswith(f"{name}."):
            file.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that it is gone at once for whoever still looks into it."""
    gone = build_temporary_path(folder)
    # Deleting takes time; a rename is atomic, so that no process sees a folder with some of its files.
    try:
        os.replace(folder, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def publish_file(written: Path, path: Path) -> None:
    """Rename a file that is on disk (see `sync_to_disk`) to its final name, and wait until the name is on disk."""
    os.replace(written, path)
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def stage_files(contents: dict[Path, bytes], durable: bool = True) -> Iterator[Callable[[], None]]:
    """Small files on disk under temporary names, and a function that gives them theirs, in order.

    Whatever can fail for lack of space has happened before the block begins. Files that need not be `durable` may be
    empty after a loss of power.
    """
    written = {build_temporary_path(path): path for path in contents}
    try:
        for name, path in written.items():
            name.write_bytes(contents[path])
            if durable:
                sync_to_disk(name)

        def publish_all() -> None:
            for name, path in written.items():
                (publish_file if durable else os.replace)(name, path)

        yield publish_all
    finally:
        for name in written:
            name.unlink(missing_ok=True)


@contextmanager
def hold_lock(path: Path, timeout_s: float, waiting: Callable[[str], None] = lambda holder: None) -> Iterator[None]:
    """Hold the lock file `path`, which is removed afterwards; the kernel frees it when its holder dies.

    Args:
        path: The lock file; its folder exists.
        timeout_s: How long to wait for another holder.
        waiting: Called once with the holder's description when there is something to wait for.

    Raises:
        PrimusError: The holder did not finish in time, or the file system has no locks.
    """
    descriptor = _acquire_lock(path, time.monotonic() + timeout_s, waiting)
    try:
        yield
    finally:
        # Unlink before the lock is released: nobody can lock a file that is about to lose its name.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def remove_lock(path: Path) -> None:
    """Delete a lock file that a killed holder has left."""
    if path.exists() and (descriptor := try_acquire(path)) is not None:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def hold_in_use(path: Path) -> Iterator[None]:
    """Mark something as in use by a shared lock, which ends with the process; several processes can hold it at once.

    Raises:
        PrimusError: The file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _try_flock(descriptor, fcntl.LOCK_SH, path)
        yield
    finally:
        os.close(descriptor)


def is_in_use(path: Path) -> bool:
    """Whether a process holds `hold_in_use` on the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
    finally:
        os.close(descriptor)


def try_acquire(path: Path) -> int | None:
    """A descriptor that holds the lock file `path` until it is closed; None where somebody else holds it.

    Raises:
        PrimusError: The file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not _try_lock(descriptor, path):
        os.close(descriptor)
        return None
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
    return descriptor


def build_write_error(output: Path, error: OSError) -> PrimusError:
    """What to tell somebody whose output could not be written."""
    reason = error.strerror or str(error)
    if error.errno not in FULL_DISK:
        return PrimusError(f"{error.filename or output}: cannot be written, {reason}", "give another --output")
    folder = next(each for each in (output, *output.parents) if each.is_dir())
    return PrimusError(
        f"{output}: cannot be written, {reason} ({shutil.disk_usage(folder).free / 1e6:,.0f} MB are free)",
        "free some space or give an --output on another disk; existing files are unchanged",
    )


def _acquire_lock(path: Path, deadline: float, waiting: Callable[[str], None]) -> int:
    told = False
    while True:
        if (descriptor := try_acquire(path)) is not None:
            return descriptor
        holder = _describe_holder(path)
        if time.monotonic() > deadline:
            raise PrimusError(f"{path}: still held by {holder}", "wait for it, or stop it, then run this again")
        if not told:
            waiting(holder)
            told = True
        time.sleep(POLL_S)


def _try_lock(descriptor: int, path: Path) -> bool:
    """Whether the lock is ours; a lock on a file that its holder has removed meanwhile does not count."""
    try:
        if not _try_flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path):
            return False
    except PrimusError:
        os.close(descriptor)
        raise
    # The holder may have unlinked the file between our open and our lock: then the lock is on a nameless file, which
    # protects nothing, and another process may hold a lock on a new file of the same name.
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _try_flock(descriptor: int, operation: int, path: Path) -> bool:
    """Whether a lock could be had."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.ESTALE:  # on NFS: its holder on another machine has removed it
            return False
        raise PrimusError(
            f"{path.parent}: this file system has no file locks ({error.strerror})",
            "prepare the data on a local disk or on a file system mounted with locks",
        ) from None
    return True


def _describe_holder(path: Path) -> str:
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"

"""Write files atomically (temporary name, sync, rename), and lock files between processes.

Locks are ``flock`` locks: the kernel releases them when the process dies, also after SIGKILL, so no lock becomes stale.
The lock files themselves may remain; an unlocked lock file has no meaning.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from primus.errors import PrimusError, describe_owner
from primus.runs.files import sync_to_disk

POLL_S = 0.1
"""Interval between attempts to lock: ``flock`` has no time limit, so a bounded wait has to poll."""
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def build_temporary_path(path: Path) -> Path:
    """Name for the content of `path` while it is written; in the same folder, because only there a rename is atomic."""
    return path.with_name(f"{path.name}.tmp.{os.getpid()}")


def remove_stale(folder: Path, name: str) -> None:
    """Delete temporary files ``NAME.*`` of killed writers.

    Call it with the lock of these files held: without it, the files of a running writer are deleted too.
    """
    for file in folder.glob("*.tmp.*"):
        if file.name.startswith(f"{name}."):
            file.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Delete a folder in one step, as seen by processes that still read it."""
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
    # The name belongs to the folder: without this sync a power failure can undo the rename, or reorder two of them.
    sync_to_disk(path.parent)


def delete_file(path: Path) -> None:
    """Delete a file if there is one, and wait until that is on disk, so that no later rename can precede it."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync_to_disk(path.parent)


@contextmanager
def stage_files(contents: dict[Path, bytes], durable: bool = True) -> Iterator[Callable[[], None]]:
    """Write small files under temporary names, and yield a function that renames them to their final names in order.

    Everything that needs disk space happens before the block begins. Without `durable`, files may be empty after a
    power failure.
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
    """Hold an exclusive lock within the block and remove the lock file afterwards.

    Args:
        path: The lock file; its folder exists.
        timeout_s: Longest wait for another holder.
        waiting: Called once, with a description of the holder, if another process holds the lock.

    Raises:
        PrimusError: The holder did not finish in time, or the file system does not support locks.
    """
    descriptor = _acquire_lock(path, time.monotonic() + timeout_s, waiting)
    try:
        yield
    finally:
        # Unlink while the lock is held. After the release, another process may hold a lock on this name.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def remove_lock(path: Path) -> None:
    """Delete the lock file of a killed holder; a lock that is held stays."""
    if path.exists() and (descriptor := try_acquire(path)) is not None:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def hold_in_use(path: Path) -> Iterator[None]:
    """Hold a shared lock within the block, which marks something as in use. Several processes can hold it at once.

    Raises:
        PrimusError: The file system does not support locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _try_flock(descriptor, fcntl.LOCK_SH, path)
        yield
    finally:
        os.close(descriptor)


def is_in_use(path: Path) -> bool:
    """Whether a process is in a `hold_in_use` block of the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # An exclusive lock is granted only while no shared lock exists. Closing the descriptor releases it again.
        return not _try_flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
    finally:
        os.close(descriptor)


def try_acquire(path: Path) -> int | None:
    """Try to lock the file `path` without waiting.

    Returns:
        A descriptor that holds the lock until it is closed, or None if another process holds the lock.

    Raises:
        PrimusError: The file system does not support locks.
    """
    # O_CLOEXEC: a child process that inherits the descriptor would keep the lock after this process has ended.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not _try_lock(descriptor, path):
        os.close(descriptor)
        return None
    # The content only describes the holder in messages; the lock itself is in the kernel.
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
    return descriptor


def build_write_error(output: Path, error: OSError) -> PrimusError:
    """Error for an output that cannot be written; a full disk is reported with its free space."""
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        hint = f"{describe_owner(output)}: give another --output, or ask for permission"
        return PrimusError(f"{error.filename or output}: cannot be written: {reason}", hint)
    if error.errno not in FULL_DISK:
        return PrimusError(f"{error.filename or output}: cannot be written: {reason}", "give another --output")
    folder = next(each for each in (output, *output.parents) if each.is_dir())
    return PrimusError(
        f"{output}: cannot be written: {reason} ({shutil.disk_usage(folder).free / 1e6:,.0f} MB are free)",
        "free some space or give an --output on another disk; existing files are unchanged",
    )


def _acquire_lock(path: Path, deadline: float, waiting: Callable[[str], None]) -> int:
    is_reported = False
    while True:
        if (descriptor := try_acquire(path)) is not None:
            return descriptor
        holder = _describe_holder(path)
        if time.monotonic() > deadline:
            raise PrimusError(f"{path}: still locked by {holder}", "wait for it, or stop it, then run this again")
        if not is_reported:
            waiting(holder)
            is_reported = True
        time.sleep(POLL_S)


def _try_lock(descriptor: int, path: Path) -> bool:
    """Whether this process now holds the lock; a lock on a file that has been removed meanwhile does not count."""
    try:
        if not _try_flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path):
            return False
    except PrimusError:
        os.close(descriptor)
        raise
    # The previous holder may unlink the file between `open` and `flock`. The lock is then on a file without a name and
    # protects nothing: another process may hold a lock on a new file of the same name.
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _try_flock(descriptor: int, operation: int, path: Path) -> bool:
    """Apply a lock operation to an open file; return whether the lock was granted."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.ESTALE:  # NFS: the holder on another machine has removed the file
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

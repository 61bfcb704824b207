"""Write and read rates of the folders of a run, by fio if it is installed, else by direct I/O."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from primus import process
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode
from primus.preflight.findings.rules import About, report_info
from primus.report import table

BLOCK_BYTES = 4 << 20
"""A multiple of any device's block, large enough for a striped file system."""
FILE_BYTES, QUICK_BYTES = 1 << 30, 32 << 20
SECONDS, QUICK_SECONDS = 10.0, 1.0
"""Duration of writing a folder, and of reading it."""
FREE_SHARE = 4
"""Maximum share of the free space that a file uses."""


class FioTransfer(Struct, frozen=True):
    """One direction of a job in the output of ``fio --output-format=json``."""

    bw_bytes: float = 0.0


class FioJob(Struct, frozen=True):
    read: FioTransfer = FioTransfer()
    write: FioTransfer = FioTransfer()
    error: int = 0


class FioOutput(Struct, frozen=True):
    jobs: tuple[FioJob, ...] = ()


class StorageSpeed(Struct, frozen=True, kw_only=True):
    """Rates of one folder in 1e6 B/s."""

    write_mb_per_s: float
    read_mb_per_s: float
    how: str


def measure_folders(node: PreflightNode, *, is_quick: bool = False) -> Iterator[CheckFinding]:
    """Rates of the folders that a run writes to, or of their nearest existing parents."""
    seen: set[Path] = set()
    for path, purpose in node.expected.folders:
        folder = Path(os.path.expanduser(path)).absolute()
        there = next((parent for parent in [folder, *folder.parents] if parent.is_dir()), Path("/"))
        if there in seen or not os.access(there, os.W_OK):
            continue
        seen.add(there)
        about = About(f"{purpose} {there}")
        try:
            speed = _measure_with_fio(node, there, is_quick) or measure_with_direct_io(
                there, _choose_size(there, is_quick), _choose_duration(is_quick)
            )
        except OSError as error:
            yield node.judge("performance.storage/failed", False, f"{error.strerror or error}", about)
            continue
        yield _judge_speed(node, speed, about)


def _judge_speed(node: PreflightNode, speed: StorageSpeed, about: About) -> CheckFinding:
    """Findings for the rates of a folder."""
    slowest = min(speed.write_mb_per_s, speed.read_mb_per_s)
    shown = (
        f"written {table.format_number(speed.write_mb_per_s)} MB/s, read "
        f"{table.format_number(speed.read_mb_per_s)} MB/s ({speed.how})"
    )
    if not node.limits.storage_mb_per_s:
        return report_info("performance.storage", shown, about=about, value=slowest)
    return node.judge("performance.storage", slowest, shown, about)


def _choose_size(folder: Path, is_quick: bool) -> int:
    held = os.statvfs(folder)
    wanted = QUICK_BYTES if is_quick else FILE_BYTES
    fits = held.f_bavail * held.f_frsize // FREE_SHARE // BLOCK_BYTES * BLOCK_BYTES
    return max(BLOCK_BYTES, min(wanted, fits))


def _choose_duration(is_quick: bool) -> float:
    return QUICK_SECONDS if is_quick else SECONDS


def _measure_with_fio(node: PreflightNode, folder: Path, is_quick: bool) -> StorageSpeed | None:
    """Rates from fio; None if it is not installed or prints no figures."""
    rates = {}
    path = folder / f".primus-fio.{os.getpid()}"
    seconds = _choose_duration(is_quick)
    try:
        for direction in ("write", "read"):
            words = [
                "fio", "--name=primus", f"--filename={path}", f"--rw={direction}",
                f"--size={_choose_size(folder, is_quick)}",
                f"--bs={BLOCK_BYTES}", "--direct=1", "--ioengine=psync", "--numjobs=1", f"--runtime={seconds:g}",
                "--end_fsync=1", "--output-format=json",
            ]  # fmt: skip
            answer = process.run_command(words, node.environ, 3 * seconds + 10)
            rate = parse_fio(answer.text, direction) if answer.state == "ok" else None
            if rate is None:
                return None
            rates[direction] = rate
    finally:
        path.unlink(missing_ok=True)
    return StorageSpeed(write_mb_per_s=rates["write"] / 1e6, read_mb_per_s=rates["read"] / 1e6, how="fio, direct")


def parse_fio(text: str, direction: str) -> float | None:
    """Bytes per second of a direction in fio's JSON, which may follow lines of notes; None if there are none."""
    start = text.find("{")
    try:
        jobs = msgspec.json.decode(text[max(start, 0) :], type=FioOutput).jobs
    except msgspec.MsgspecError:
        return None
    if not jobs or any(job.error for job in jobs):
        return None
    transfers = [job.write if direction == "write" else job.read for job in jobs]
    return sum(transfer.bw_bytes for transfer in transfers) or None


def measure_with_direct_io(folder: Path, size_bytes: int, seconds: float) -> StorageSpeed:
    """Write a file without the page cache, sync it, and read it back; removes it.

    Raises:
        OSError: It cannot be written or read, or the data that was read differs.
    """
    path = folder / f".primus-speed.{os.getpid()}"
    try:
        how = "direct"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        except OSError:  # some file systems have no direct I/O: tmpfs before Linux 6.6, some network file systems
            path.unlink(missing_ok=True)
            file, how = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "through the page cache"
        try:
            # Without direct I/O the data is still in the page cache: its pages are dropped, so that the read uses the
            # disk.
            written, write_rate = _write_blocks(file, size_bytes, seconds)
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            read_rate = _read_blocks(file, written)
        finally:
            os.close(file)
    finally:
        path.unlink(missing_ok=True)
    return StorageSpeed(write_mb_per_s=write_rate / 1e6, read_mb_per_s=read_rate / 1e6, how=how)


def _write_blocks(file: int, size_bytes: int, seconds: float) -> tuple[int, float]:
    """Bytes written until the size or the time is reached, and bytes per second."""
    with mmap.mmap(-1, BLOCK_BYTES) as block:  # aligned to pages, as direct I/O demands
        block.write(os.urandom(BLOCK_BYTES))
        started, written = time.monotonic(), 0
        while written < size_bytes and time.monotonic() - started < seconds:
            # Each block starts with its offset, which the read compares: a misplaced or repeated block is detected.
            block[:8] = written.to_bytes(8, "little")
            count = os.write(file, block)
            if count != BLOCK_BYTES:
                raise OSError(0, f"only {count} of {BLOCK_BYTES} bytes were written")
            written += count
        os.fsync(file)
        return written, written / max(time.monotonic() - started, 1e-9)


def _read_blocks(file: int, size_bytes: int) -> float:
    """Bytes per second of reading the file back."""
    os.lseek(file, 0, os.SEEK_SET)
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        started = time.monotonic()
        for place in range(0, size_bytes, BLOCK_BYTES):
            count = os.readv(file, [block])
            if count != BLOCK_BYTES or block[:8] != place.to_bytes(8, "little"):
                raise OSError(0, f"what was read at {place} differs from what was written")
        return size_bytes / max(time.monotonic() - started, 1e-9)

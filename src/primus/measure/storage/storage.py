"""Speed of a folder: sequential and random writes and reads of one file without the page cache."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import structs

from primus.benchmark import BenchmarkContext, BenchmarkRow, CaseValue
from primus.errors import PrimusError
from primus.measure.storage.timed_passes import PassAmount, measure_passes
from primus.report.table import format_size

PATTERNS = ("sequential_write", "sequential_read", "random_write", "random_read")
MOST_RANDOM = 4096
"""Blocks of a pass of random accesses."""
FREE_SHARE = 2
"""Share of the free space that the file may use: a full disk would disturb other programs."""
SEED = 7


def measure_folder(
    context: BenchmarkContext, folder: Path, size_bytes: int, block_bytes: int, random_bytes: int, longest_s: float
) -> Iterator[BenchmarkRow]:
    """A row for each pattern; the file is removed.

    Raises:
        PrimusError: The folder cannot be written, or has too little space.
    """
    path = folder / f".primus-benchmark.{os.getpid()}"
    try:
        held = os.statvfs(folder)
        free_bytes = held.f_bavail * held.f_frsize
        if size_bytes * FREE_SHARE > free_bytes:
            raise PrimusError(
                f"{folder}: a file of {format_size(size_bytes)} would use more than half of the "
                f"{format_size(free_bytes)} that are free", "choose a smaller --size-mib",
            )  # fmt: skip
        with StorageFile(path, size_bytes) as file:
            for pattern in PATTERNS:
                block = random_bytes if pattern.startswith("random") else block_bytes
                yield _measure_pattern(context, file, folder, pattern, block, longest_s)
    except OSError as error:
        raise PrimusError(f"{folder}: {error.strerror or error}", "choose a folder that can be written") from None
    finally:
        path.unlink(missing_ok=True)


def _measure_pattern(
    context: BenchmarkContext, file: StorageFile, folder: Path, pattern: str, block_bytes: int, longest_s: float
) -> BenchmarkRow:
    offsets = file.list_offsets(block_bytes, is_random=pattern.startswith("random"))
    run_pass = file.write_blocks if pattern.endswith("write") else file.read_blocks
    case: dict[str, CaseValue] = {
        "pattern": pattern,
        "block_kib": block_bytes / 1024,
        "file_mib": file.size_bytes / 2**20,
        "folder": str(folder),
        "how": file.how,
    }
    call: Callable[[], float] = lambda: run_pass(offsets, block_bytes)  # noqa: E731
    row = measure_passes(
        context,
        case,
        call,
        PassAmount(
            len(offsets) * block_bytes / 1e9,
            "GB/s",
            "bytes of a pass / its median time, one thread; a write ends with fsync, which is timed; the data "
            "is random",
        ),
        longest_s=longest_s,
    )
    if row.timing is None:
        return row
    return structs.replace(row, figures={"iops": len(offsets) / row.timing.median_s})


class StorageFile:
    """The file that is written and read."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.how = "direct"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError:  # some file systems have no direct I/O: tmpfs before Linux 6.6, some network file systems
            path.unlink(missing_ok=True)
            self._file = os.open(path, flags, 0o600)
            self.how = "page cache emptied"

    def __enter__(self) -> StorageFile:
        # Blocks that were never written have no place on the disk, and reading them needs no access.
        self.write_blocks(self.list_offsets(1 << 20, is_random=False), 1 << 20)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def list_offsets(self, block_bytes: int, *, is_random: bool) -> list[int]:
        """Where the blocks of a pass are."""
        offsets = list(range(0, self.size_bytes - block_bytes + 1, block_bytes))
        if is_random:
            return random.Random(SEED).sample(offsets, min(MOST_RANDOM, len(offsets)))
        return offsets

    def write_blocks(self, offsets: list[int], block_bytes: int) -> float:
        """Seconds for writing blocks and for the sync."""
        with _make_block(block_bytes) as block:
            block.write(random.Random(SEED).randbytes(block_bytes))
            started = time.perf_counter()
            for offset in offsets:
                if os.pwrite(self._file, block, offset) != block_bytes:
                    raise OSError(f"{block_bytes} bytes at {offset} were not written at once")
            os.fsync(self._file)
            return time.perf_counter() - started

    def read_blocks(self, offsets: list[int], block_bytes: int) -> float:
        """Seconds for reading blocks."""
        if self.how != "direct" and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        with _make_block(block_bytes) as block:
            started = time.perf_counter()
            for offset in offsets:
                if os.preadv(self._file, [block], offset) != block_bytes:
                    raise OSError(f"{block_bytes} bytes at {offset} were not read at once")
            return time.perf_counter() - started


@contextlib.contextmanager
def _make_block(block_bytes: int) -> Iterator[mmap.mmap]:
    """Memory at the start of a page, as direct I/O needs it."""
    with mmap.mmap(-1, block_bytes) as block:
        yield block

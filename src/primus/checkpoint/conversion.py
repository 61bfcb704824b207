"""Write a checkpoint so that it is complete or absent, and continue after a kill.

Files are written into `.NAME.partial` next to the target, each under a temporary name that is replaced when it is
complete. The journal in that folder has the plan's fingerprint, then a line for each complete file: the same command
skips them. When all are there the folder is renamed to the target. An error other than a kill removes the folder.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from primus.checkpoint.output import JOURNAL, LOCK, FileRecord, OutputFile, OutputPlan, split_bytes
from primus.errors import PrimusError, UsageError
from primus.runs.files import sync_to_disk

SMALL_BYTES = 64 << 10
"""Data that is written together with what follows it."""

WRITEBACK_BYTES = 32 << 20
"""Data after which the disk begins to write, so that the end waits for the last part only."""
SYNC_FILE_RANGE_WRITE = 2
"""Begin to write changed pages, and do not wait (sync_file_range(2))."""

Report = Callable[[int], None]
"""Called with the number of bytes of tensors that are done."""


def name_partial_folder(target: Path) -> Path:
    """The folder of an unfinished conversion."""
    return target.parent / f".{target.name}.partial"


def check_target(target: Path) -> None:
    """Refuse a target that is there already.

    Raises:
        UsageError: It exists and is not an empty folder.
    """
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target}: exists", "choose another folder, or remove it")


def write_checkpoint(target: Path, plan: OutputPlan, fingerprint: str, report: Report = lambda _: None) -> int:
    """Write all files of a plan; returns the number of files that an interrupted run had written already.

    Args:
        target: The folder, which is not there.
        plan: The files.
        fingerprint: Of the source and the settings: files of an interrupted run with another one are not kept.
        report: See `Report`.

    Raises:
        UsageError: The target exists, or another process is writing it.
        PrimusError: It cannot be written; nothing is left of it.
    """
    # Resolved: a link to an empty folder names the disk that is meant.
    target = Path(os.path.realpath(target))
    check_target(target)
    partial = name_partial_folder(target)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _hold_lock(partial):
            _check_again(target, partial)
            records = _read_journal(partial, fingerprint)
            _check_space(partial, plan, records)
            kept = len(records)
            # Rewritten: the last line may be incomplete.
            with (partial / JOURNAL).open("w", encoding="utf-8") as journal:
                for line in (fingerprint, *map(list, records.items())):
                    _append_line(journal, line)
                for file in plan.files:
                    if file.name in records:
                        report(file.num_bytes)
                        continue
                    records[file.name] = _write_file(partial, file, report)
                    _append_line(journal, [file.name, records[file.name]])
            plan.finish(partial, records)
            _complete_folder(partial, target)
            return kept
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise PrimusError(
            f"{target}: cannot be written: {error.strerror or error}",
            f"the partial result was removed; {_advise(error)}",
        ) from None
    except PrimusError as error:
        if not isinstance(error, UsageError):
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_file(folder: Path, file: OutputFile, report: Report) -> FileRecord:
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb", buffering=0) as opened:
        joined = _JoinedWrites(opened)
        record = file.write(joined, report)  # type: ignore[arg-type]
        joined.flush()
        # Before the rename: the journal must not name a file without content after a power cut.
        os.fsync(opened.fileno())
    os.replace(temporary, path)
    return record


class _JoinedWrites:
    """An unbuffered file whose writes are never partial, with small ones written together.

    `torch.save` makes some forty small writes for a tensor. Elements of tensors go to the page cache without another
    copy.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._small = bytearray()
        self._written = self._begun = 0
        """Bytes of the file, and those of them that the disk writes already."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) <= SMALL_BYTES:
            self._small += view
        else:
            self.flush()
            self._write_whole(view)
        return len(view)

    def flush(self) -> None:
        """Write what is left."""
        small, self._small = self._small, bytearray()
        self._write_whole(small)

    def _write_whole(self, data: Any) -> None:
        for part in split_bytes(data):
            done = 0
            while done < len(part):
                done += self._file.write(part[done:])
        self._written += len(data)
        if self._written - self._begun >= WRITEBACK_BYTES:
            _begin_writeback(self._file.fileno(), self._begun, self._written)
            self._begun = self._written


def _begin_writeback(descriptor: int, start: int, end: int) -> None:
    """Let the disk write a part of a file while the next one is copied."""
    # Without a wrapper in `os`. posix_fadvise(DONTNEED) begins it too, and waits for a task on each processor.
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:  # Linux only
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(end - start), SYNC_FILE_RANGE_WRITE)


def _check_space(partial: Path, plan: OutputPlan, records: dict[str, FileRecord]) -> None:
    needed = sum(file.num_bytes for file in plan.files if file.name not in records)
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise PrimusError(
            f"{partial.parent}: {needed / 1e9:,.1f} GB are needed, and {free / 1e9:,.1f} GB are free",
            "free some space, or choose another disk",
        )


def _read_journal(partial: Path, fingerprint: str) -> dict[str, FileRecord]:
    """Records of the files that are complete; removes those of another plan."""
    lines: list[Any] = []
    try:
        for line in (partial / JOURNAL).read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(line))  # noqa: PERF401 - lines before a torn one count
    except (FileNotFoundError, ValueError):
        pass
    if lines and lines[0] == fingerprint:
        return {name: record for name, record in lines[1:] if (partial / name).is_file()}
    for path in partial.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {}


def _append_line(journal: Any, value: Any) -> None:
    journal.write(json.dumps(value) + "\n")
    journal.flush()


def _complete_folder(partial: Path, target: Path) -> None:
    """Rename the folder to the target when all its files are durable."""
    for path in partial.rglob("*"):
        if path.name != JOURNAL:
            sync_to_disk(path)
    (partial / JOURNAL).unlink()
    sync_to_disk(partial)
    os.replace(partial, target)
    # After the rename: until then the lock keeps another process from removing files that have no journal.
    (target / LOCK).unlink()
    sync_to_disk(target.parent)


def _check_again(target: Path, partial: Path) -> None:
    """Refuse a target that another process completed between the first check and the lock."""
    try:
        check_target(target)
    except UsageError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _advise(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space, and run the command again"
    return "choose another folder, or repair this one"


@contextmanager
def _hold_lock(partial: Path) -> Iterator[None]:
    """Keep other processes from writing the same target.

    Raises:
        UsageError: One is writing it.
    """
    with (partial / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{partial}: another process is writing it", "wait until it ends") from None
        yield

"""Checks of the folders of a run: writable, enough space, and the time to write and read a small file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, judge_value, report_info
from primus.report import table

GIB = 1 << 30
SAMPLE_BYTES = 4 << 20
"""Small enough for any file system, large enough for more than one block."""
NETWORK_TYPES = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "wekafs",
    "fuse.juicefs",
    "9p",
    "virtiofs",
)


OFTEN_READ_ONLY = ("data", "HF_HOME")
"""Folders that may exist in advance and are only read."""


def check_folders(node: PreflightNode) -> Iterator[CheckFinding]:
    """Each folder of a run, once; a missing folder is judged by its nearest existing parent."""
    seen: set[Path] = set()
    for path, purpose in node.expected.folders:
        folder = Path(os.path.expanduser(path)).absolute()
        if folder not in seen:
            seen.add(folder)
            yield from _check_folder(node, folder, purpose)


def _check_folder(node: PreflightNode, folder: Path, purpose: str) -> Iterator[CheckFinding]:
    there = next((parent for parent in [folder, *folder.parents] if os.path.isdir(parent)), Path("/"))
    subject = f"{purpose} {folder}"
    problem, seconds = _measure_sample(there)
    kind = find_file_system(there, node.tree.read_text("proc/self/mounts") or "")
    place = f"{kind}{', a network file system' if kind in NETWORK_TYPES else ''}"
    yield judge_value(
        not problem,
        "warn" if purpose in OFTEN_READ_ONLY else "fail",
        "storage.writable",
        problem or f"{place}; {SAMPLE_BYTES >> 20} MiB written and read in {seconds * 1e3:.0f} ms",
        "a file can be written, synced and read",
        "a run, its data or its caches are kept there",
        "choose another folder, or fix its owner and mode",
        subject=subject,
        value=None if problem else round(seconds, 4),
    )
    if problem:
        return
    held = os.statvfs(there)
    free = held.f_bavail * held.f_frsize
    is_temporary = purpose == "temporary files"
    least_gib = node.limits.temporary_free_gib if is_temporary else node.limits.storage_free_gib
    yield judge_value(
        free >= least_gib * GIB,
        "fail" if free < GIB // 16 else "warn",
        "storage.free",
        table.format_size(free),
        f">= {least_gib:g} GiB",
        "a job stops when checkpoints or caches do not fit",
        "remove old runs (`runs clean`), or choose another folder",
        subject=subject,
        value=free,
    )
    if held.f_files:  # 0 if the file system does not count them, such as btrfs
        yield judge_value(
            held.f_favail >= node.limits.free_inodes,
            "warn",
            "storage.inodes",
            f"{held.f_favail:,} files",
            f">= {node.limits.free_inodes:,}",
            "no free inodes means a full disk",
            "remove small files",
            subject=subject,
            value=held.f_favail,
        )
    else:
        yield report_info("storage.inodes", f"{kind} counts none", subject=subject)


def _measure_sample(folder: Path) -> tuple[str, float]:
    """Write, sync, read and remove a small file; returns the problem, empty on success, and the seconds."""
    path = folder / f".primus-preflight.{os.getpid()}"
    data = os.urandom(SAMPLE_BYTES)
    began = time.monotonic()
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        is_same = path.read_bytes() == data
    except OSError as error:
        return f"{folder}: {error.strerror}", 0.0
    finally:
        path.unlink(missing_ok=True)
    return ("" if is_same else f"{folder}: what was read differs from what was written"), time.monotonic() - began


def find_file_system(folder: Path, mounts: str) -> str:
    """Type of the file system of a folder, from the text of /proc/self/mounts; the longest mount point wins."""
    best, kind = "", "unknown file system"
    real = str(folder.resolve())
    for line in mounts.splitlines():
        words = line.split()
        point = words[1].replace("\\040", " ") if len(words) > 2 else ""
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        if point and is_above and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


CHECKS = (check_folders,)

"""Checks of the folders of a run: writable, enough space, and the time to write and read a small file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode
from primus.preflight.findings.rules import About, report_info

LEAST_BYTES = 1 << 26
"""With less free space nothing can run."""
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
    about = About(f"{purpose} {folder}")
    problem, seconds = _measure_sample(there)
    kind = find_file_system(there, node.tree.read_text("proc/self/mounts") or "")
    place = f"{kind}{', a network file system' if kind in NETWORK_TYPES else ''}"
    shown = problem or f"{place}; {SAMPLE_BYTES >> 20} MiB written and read in {seconds * 1e3:.0f} ms"
    words = {
        "status": "warn" if purpose in OFTEN_READ_ONLY else "fail",
        "value": None if problem else round(seconds, 4),
    }
    yield node.judge("storage.writable", not problem, shown, about, **words)
    if problem:
        return
    held = os.statvfs(there)
    free = held.f_bavail * held.f_frsize
    row = "storage.free/temporary" if purpose == "temporary files" else "storage.free"
    yield node.judge(row, free, "", about, status="fail" if free < LEAST_BYTES else "warn")
    if held.f_files:  # 0 if the file system does not count them, such as btrfs
        yield node.judge("storage.inodes", held.f_favail, f"{held.f_favail:,} files", about)
    else:
        yield report_info("storage.inodes", f"{kind} counts none", about=about)


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
        with contextlib.suppress(OSError):  # on a read-only file system even where there is no file
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

"""Sequential and random writes and reads of a folder, with fsync and without the page cache: GB/s."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow
from primus.errors import UsageError


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark storage`."""

    folder: str | None = None
    """Folder to write to (default: --workspace); the file is removed."""
    size_mib: Annotated[int, Meta(ge=1)] | None = None
    """Size of the file of each process, in MiB (default: 1024, with --quick 32)."""
    block_kib: Annotated[int, Meta(ge=4)] = 4096
    """Block of sequential accesses, in KiB."""
    random_kib: Annotated[int, Meta(ge=4)] = 4
    """Block of random accesses, in KiB."""


def check_options(options: Options) -> None:
    """Refuse a folder that does not exist, and blocks that direct I/O does not take."""
    if options.folder is not None and not Path(os.path.expanduser(options.folder)).is_dir():
        raise UsageError(f"--folder {options.folder}: not a folder")
    for name, kib in (("--block-kib", options.block_kib), ("--random-kib", options.random_kib)):
        if kib % 4:
            raise UsageError(f"{name} {kib}: expected a multiple of 4")
        if kib << 10 > _find_size(options):
            raise UsageError(f"{name} {kib}: more than the file of {_find_size(options) >> 20} MiB", "raise --size-mib")


def _find_size(options: Options) -> int:
    return (options.size_mib or (32 if options.quick else 1024)) << 20


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for each pattern."""
    from primus.measure.storage.storage import measure_folder

    folder = Path(os.path.expanduser(options.folder or options.workspace)).resolve()
    longest_s = min(options.duration, 0.2) if options.quick else options.duration
    yield from measure_folder(
        context, folder, _find_size(options), options.block_kib << 10, options.random_kib << 10, longest_s
    )

"""Writing and reading of a checkpoint by torch.distributed.checkpoint: GB/s."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from primus.benchmark import BenchmarkContext, BenchmarkOptions, BenchmarkRow
from primus.errors import UsageError

TENSOR_BYTES = 32 << 20
MOST_PASSES = 20


class Options(BenchmarkOptions, frozen=True, kw_only=True):
    """Options of `benchmark checkpoint`."""

    folder: str | None = None
    """Folder of the checkpoint (default: --workspace); it is removed."""
    size_mib: Annotated[int, Meta(ge=1)] | None = None
    """State of each process, in MiB (default: 1024, with --quick 32)."""


def check_options(options: Options) -> None:
    """Refuse a folder that does not exist."""
    if options.folder is not None and not Path(os.path.expanduser(options.folder)).is_dir():
        raise UsageError(f"--folder {options.folder}: not a folder")


def measure(options: Options, context: BenchmarkContext) -> Iterator[BenchmarkRow]:
    """A row for writing, with a sync of the files, and one for reading; each rank has its own part of the state."""
    import torch

    from primus.measure.storage.timed_passes import PassAmount, measure_passes

    size = (options.size_mib or (32 if options.quick else 1024)) << 20
    parent = Path(os.path.expanduser(options.folder or options.workspace)).resolve()
    path = parent / f".primus-checkpoint-{context.rank}-{os.getpid()}"
    count = max(1, size // TENSOR_BYTES)
    state = {f"weight_{n}": torch.randn(size // count // 4, device=context.device) for n in range(count)}

    def write() -> float:
        shutil.rmtree(path, ignore_errors=True)
        started = time.perf_counter()
        _save_state(state, path)
        return time.perf_counter() - started

    def read() -> float:
        _empty_page_cache(path)
        started = time.perf_counter()
        _load_state(state, path)
        return time.perf_counter() - started

    try:
        for direction, run_pass in (("write", write), ("read", read)):
            yield measure_passes(
                context,
                {"direction": direction, "state_mib": size / 2**20, "folder": str(parent)},
                run_pass,
                PassAmount(
                    sum(tensor.nbytes for tensor in state.values()) / 1e9,
                    "GB/s",
                    "bytes of the state of this rank / median time; a write ends with a sync of its files; a "
                    "read starts without the page cache, where the system allows that",
                ),
                longest_s=min(options.duration, 0.2) if options.quick else options.duration,
                most_passes=MOST_PASSES,
            )
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _save_state(state: dict[str, Any], path: Path) -> None:
    from torch.distributed.checkpoint import filesystem, state_dict_saver

    state_dict_saver.save(state, storage_writer=filesystem.FileSystemWriter(path, sync_files=True), no_dist=True)


def _load_state(state: dict[str, Any], path: Path) -> None:
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    state_dict_loader.load(state, storage_reader=filesystem.FileSystemReader(path), no_dist=True)


def _empty_page_cache(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

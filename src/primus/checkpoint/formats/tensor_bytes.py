"""Move the bytes of tensors between memory and files with one copy: from the page cache into the page cache.

A large part of a file is mapped into memory, so that writing it copies it for the first time. Only a part is mapped at
a time: mapped pages count as memory of the process.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from primus.errors import PrimusError

FEWEST_MAPPED_BYTES = 1 << 20
"""Smaller tensors are read: a mapping costs as much as a copy of some hundred kilobytes."""
MADV_POPULATE_READ = 22
"""Map all pages now (madvise(2), Linux 5.14): a failing disk is then an error, and later would be a SIGBUS."""


def read_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor from `offset` of a file, which must not change while the tensor is in use.

    Raises:
        PrimusError: The file is shorter, or cannot be read.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        # Unbuffered: the bytes go from the page cache into the tensor.
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size < offset + num_bytes:
                raise PrimusError(
                    f"{path}: truncated: {offset + num_bytes} bytes expected, {size} found",
                    "copy it again from its source",
                )
            if num_bytes >= FEWEST_MAPPED_BYTES and offset % dtype.itemsize == 0:
                mapped = _map_bytes(file.fileno(), offset, num_bytes)
                if mapped is not None:
                    count, start = math.prod(shape), offset % mmap.ALLOCATIONGRANULARITY
                    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).reshape(shape)
            return _copy_bytes(file, offset, torch.empty(shape, dtype=dtype))
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None


def _map_bytes(descriptor: int, offset: int, num_bytes: int) -> mmap.mmap | None:
    """The pages of a part of a file, private and in memory; None where the system cannot map them at once."""
    start = offset % mmap.ALLOCATIONGRANULARITY
    # Private and writable, as torch warns of memory that is not; a write would copy the page.
    mapped = mmap.mmap(descriptor, start + num_bytes, access=mmap.ACCESS_COPY, offset=offset - start)
    try:
        mapped.madvise(mmap.MADV_WILLNEED)
        mapped.madvise(MADV_POPULATE_READ)
    except (OSError, AttributeError):  # an older kernel, another system, or a disk that fails: read it
        mapped.close()
        return None
    return mapped


def _copy_bytes(file: BinaryIO, offset: int, tensor: Tensor) -> Tensor:
    view = view_bytes(tensor)
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise PrimusError(f"{file.name}: truncated while it was read", "copy it again from its source")
        done += count
    return tensor


def write_tensor(file: BinaryIO, tensor: Tensor) -> int:
    """Write the elements of a tensor in row order; returns the number of bytes."""
    view = view_bytes(tensor.contiguous())
    file.write(view)
    return len(view)


def view_bytes(tensor: Tensor) -> memoryview:
    """The elements of a contiguous tensor, in place."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)

"""Move the bytes of tensors between memory and files, without a copy and without a page cache mapping."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from primus.errors import PrimusError


def read_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor from `offset` of a file.

    Raises:
        PrimusError: The file is shorter, or cannot be read.
    """
    tensor = torch.empty(shape, dtype=dtype)
    view = _view_bytes(tensor)
    try:
        # Unbuffered: the bytes go from the page cache into the tensor.
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise PrimusError(
                        f"{path}: truncated: {offset + len(view)} bytes expected, {offset + done} found",
                        "copy it again from its source",
                    )
                done += count
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
    return tensor


def write_tensor(file: BinaryIO, tensor: Tensor) -> int:
    """Write the elements of a tensor in row order; returns the number of bytes."""
    view = _view_bytes(tensor.contiguous())
    file.write(view)
    return len(view)


def _view_bytes(tensor: Tensor) -> memoryview:
    """The elements of a contiguous tensor, in place."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)

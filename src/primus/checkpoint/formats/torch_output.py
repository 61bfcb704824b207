"""Write files of `torch.save` whose tensors are not in memory: their elements are written when they are due."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor


class TensorFrame(NamedTuple):
    """What `torch.save` writes around the elements of a tensor: the records of a zip file, with a pickle."""

    head: bytes
    tail: bytes


@cache
def make_frame(shape: tuple[int, ...], dtype: torch.dtype) -> TensorFrame:
    """The frame of every tensor of a shape and type: the layers of a model have the same shapes."""
    tensor, file, places = torch.empty(shape, dtype=dtype), io.BytesIO(), list[int]()
    save_streamed(tensor, [tensor], file, lambda _: places.append(file.tell()))
    # A tensor without elements has no place for them.
    saved, place = file.getvalue(), (*places, file.tell())[0]
    return TensorFrame(saved[:place], saved[place:])


def save_streamed(
    content: Any, tensors: Sequence[Tensor], file: BinaryIO, write_elements: Callable[[int], None]
) -> None:
    """`torch.save` without the checksums of the zip file, which readers do not check.

    Args:
        content: What is saved.
        tensors: Those in `content` whose elements are written later. They come from `torch.empty` and are never read,
            so that they take addresses but no memory.
        file: Where it is written.
        write_elements: Writes the elements of the tensor with this index to `file`.

    Raises:
        OSError: The file cannot be written.
    """
    output = _StreamedOutput(tensors, file, write_elements)
    has_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, output)  # type: ignore[arg-type]
    except RuntimeError:
        # torch reports an exception in a write as an internal error.
        if output.error is None:
            raise
        raise output.error from None
    finally:
        torch.serialization.set_crc32_options(has_checksums)


class _StreamedOutput:
    """Passes writes on, except those from the memory of the tensors, which it tells by the address."""

    def __init__(self, tensors: Sequence[Tensor], file: BinaryIO, write_elements: Callable[[int], None]) -> None:
        self._indices = {tensor.data_ptr(): index for index, tensor in enumerate(tensors) if tensor.numel()}
        self._file, self._write_elements = file, write_elements
        self.error: Exception | None = None

    def write(self, data: memoryview) -> int:
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        try:
            if address in self._indices:
                self._write_elements(self._indices[address])
            else:
                self._file.write(data)
        except Exception as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered here."""

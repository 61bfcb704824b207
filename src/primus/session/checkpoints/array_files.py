"""Files of a checkpoint of an engine on JAX: safetensors, written one array at a time.

With Hugging Face names, `model.safetensors` is the file that Hugging Face's libraries load. The format is an 8-byte
length, a JSON header with type, shape and offsets of each tensor, then the data (huggingface/safetensors, README
"Format").
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array
from numpy.typing import NDArray

from primus.errors import PrimusError

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer_state"
CONFIG_FILE = "config.json"
TYPES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32", "uint32": "U32"}
ALIGNMENT = 8


class _TensorEntry(msgspec.Struct, frozen=True):
    """What the header says of a tensor; of the entry `__metadata__`, nothing."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class ArraySource(NamedTuple):
    """An array of a file, or a part of it in another shape."""

    array: Array
    part: tuple[int | slice, ...] = ()
    """Index of the part along the first axes; a slice is a whole axis."""
    convert: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    """Changes the values on the host."""
    new_shape: tuple[int, ...] | None = None
    """Shape that `convert` gives."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.new_shape is not None:
            return self.new_shape
        shape: tuple[int, ...] = self.array.shape
        fixed = {axis for axis, at in enumerate(self.part) if isinstance(at, int)}
        return tuple(size for axis, size in enumerate(shape) if axis not in fixed)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.array.dtype.itemsize)

    def gather_values(self) -> NDArray[Any]:
        """All values on the host of every process."""
        values = self._gather_part()
        return values if self.convert is None else self.convert(values)

    def _gather_part(self) -> NDArray[Any]:
        array = self.array[self.part] if any(isinstance(at, int) for at in self.part) else self.array
        if array.is_fully_addressable:
            return np.asarray(array)
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def save_arrays(files: Mapping[Path, Mapping[str, ArraySource]], is_writer: bool) -> None:
    """Write the arrays of each file, gathered from all processes one at a time; only the writer touches the disk.

    Raises:
        OSError: A file cannot be written; also then every array is gathered, as the other processes expect.
    """
    failure: OSError | None = None
    for path, arrays in files.items():
        failure = _save_file(path, arrays, is_writer and failure is None) or failure
    if failure is not None:
        raise failure


def _save_file(path: Path, arrays: Mapping[str, ArraySource], is_writer: bool) -> OSError | None:
    values = (array.gather_values() for array in arrays.values())
    try:
        if is_writer:
            _write_values(path, _format_header(arrays), values)
    except OSError as error:
        return error
    finally:
        # Gathering is a collective: each process takes part in the same order, also where it drops the values.
        for _ in values:
            pass
    return None


def _write_values(path: Path, header: bytes, values: Iterable[NDArray[Any]]) -> None:
    with path.open("wb") as file:
        file.write(header)
        for value in values:
            # As bytes: the buffer protocol has no format for bfloat16.
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        # The manifest that is written next says that the checkpoint is complete: its data must be on disk by then.
        file.flush()
        os.fsync(file.fileno())


def open_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Arrays of a file by name, mapped into memory: what is not used is not read.

    Raises:
        PrimusError: The file is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(length), type=dict[str, _TensorEntry])
        whole = np.memmap(path, np.uint8, "r", offset=8 + length)
        return {name: _view_array(whole, entry) for name, entry in header.items() if entry.dtype}
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise PrimusError(f"{path}: cannot be read: {error}", "choose another checkpoint") from None


def _view_array(whole: NDArray[Any], entry: _TensorEntry) -> NDArray[Any]:
    kind = next(kind for kind, name in TYPES.items() if name == entry.dtype)
    start, end = entry.data_offsets
    if end > len(whole):
        raise ValueError("the file is truncated")
    values: NDArray[Any] = whole[start:end].view(jnp.dtype(kind)).reshape(entry.shape)
    return values


def _format_header(arrays: Mapping[str, ArraySource]) -> bytes:
    entries = {}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.num_bytes
        entries[name] = _TensorEntry(TYPES[str(array.array.dtype)], tuple(array.shape), (offset, end))
        offset = end
    text = msgspec.json.encode({"__metadata__": {"format": "pt"}, **entries})
    # Spaces are valid in JSON; the data then begin at a multiple of 8, at which they can be mapped as any type.
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

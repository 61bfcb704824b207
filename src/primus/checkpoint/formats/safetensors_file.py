"""Files of the safetensors format: a length, a JSON header, the tensors (huggingface/safetensors, README "Format").

Read and written directly, as the package `safetensors` cannot write a tensor in parts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primus.checkpoint.formats.tensor_bytes import read_tensor
from primus.checkpoint.weights import TensorInfo, get_bounds
from primus.errors import PrimusError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Types of tensors, by their name in headers."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100 << 20
"""Limit of the reference implementation (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
HEADER_ALIGNMENT = 8
DAMAGED = "copy it again from its source"


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    info: TensorInfo
    offset: int
    """First byte in the file."""


class SafetensorsFile:
    """One file, opened by reading its header.

    Raises:
        PrimusError: It is not such a file, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored, self.metadata = read_header(path)

    def list_tensors(self) -> dict[str, TensorInfo]:
        return {name: stored.info for name, stored in self._stored.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        stored = self._stored[name]
        info = stored.info
        if not info.shape:
            return read_tensor(self.path, stored.offset, (), info.dtype)
        start, stop = get_bounds(rows, info.shape[0])
        row_bytes = info.num_bytes // info.shape[0] if info.shape[0] else 0
        return read_tensor(self.path, stored.offset + start * row_bytes, (stop - start, *info.shape[1:]), info.dtype)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file, and its metadata.

    Raises:
        PrimusError: It is not such a file, or shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if not 2 <= length <= MAX_HEADER_BYTES or 8 + length > size:
                raise PrimusError(f"{path}: not a safetensors file, or truncated in its header", DAMAGED)
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        stored = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in header.items()}
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PrimusError(f"{path}: its header is damaged: {error}", DAMAGED) from None
    _check_places(path, stored, 8 + length, size)
    return stored, metadata


def _check_places(path: Path, stored: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Tensors fill the file without overlaps or holes, as the reference demands (safetensors/src/tensor.rs, validate).

    Raises:
        PrimusError: They do not, or the file is shorter.
    """
    end = start
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].info.num_bytes)):
        if tensor.offset != end:
            raise PrimusError(
                f"{path}: its header is damaged: {name} starts at byte {tensor.offset} instead of {end}", DAMAGED
            )
        end += tensor.info.num_bytes
        if end > size:
            raise PrimusError(f"{path}: truncated: {name} ends at byte {end} of {size}", DAMAGED)
    if end != size:
        raise PrimusError(f"{path}: damaged: {size - end} bytes follow its last tensor", DAMAGED)


def _parse_entry(path: Path, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise PrimusError(
            f"{path}: {name} is of type {entry['dtype']}, which is not read", f"types: {', '.join(DTYPES)}"
        )
    info = TensorInfo(tuple(int(width) for width in entry["shape"]), DTYPES[entry["dtype"]])
    first, last = entry["data_offsets"]
    if last - first != info.num_bytes or first < 0:
        raise ValueError(f"{last - first} bytes for {list(info.shape)} of {entry['dtype']}")
    return StoredTensor(info, start + first)


def build_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The start of a file that holds these tensors one after the other."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, info in tensors.items():
        end = offset + info.num_bytes
        header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text

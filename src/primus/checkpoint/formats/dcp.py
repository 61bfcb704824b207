"""Folders of torch.distributed.checkpoint (DCP), read without a process group; `dcp_output` writes them.

A folder has `.metadata`, a pickle of `torch.distributed.checkpoint.metadata.Metadata`, and files of chunks. A chunk is
a box of a tensor, written by `torch.save`: a zip file with the elements uncompressed, so that rows are read
alone.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from primus.checkpoint.formats.tensor_bytes import read_tensor
from primus.checkpoint.weights import TensorInfo, get_bounds
from primus.errors import PrimusError

METADATA_NAME = ".metadata"

SAFE_NAMES = {
    **dict.fromkeys(
        ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata"), "torch.distributed.checkpoint.metadata"
    ),
    **dict.fromkeys(("ChunkStorageMetadata", "TensorProperties"), "torch.distributed.checkpoint.metadata"),
    **dict.fromkeys(("MetadataIndex", "StorageMeta"), "torch.distributed.checkpoint.metadata"),
    "_MEM_FORMAT_ENCODING": "torch.distributed.checkpoint.metadata",
    **dict.fromkeys(("SavePlan", "WriteItem", "WriteItemType"), "torch.distributed.checkpoint.planner"),
    **dict.fromkeys(("TensorWriteData", "BytesIOWriteData"), "torch.distributed.checkpoint.planner"),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "Size": "torch",
    "_get_layout": "torch.serialization",
    "OrderedDict": "collections",
    "PosixPath": "pathlib",
}
"""What a pickle of metadata may name besides `torch.dtype`s: classes that only hold values, with their modules."""

ZIP_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""Local file header of a zip file (PKWARE APPNOTE, 4.3.7); the last two numbers are lengths of name and extra field."""


class TensorChunk(NamedTuple):
    """A box of a tensor in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


class DcpFolder:
    """A folder of DCP, opened by reading its metadata.

    Args:
        folder: Has `.metadata`.

    Raises:
        PrimusError: The metadata or a file is missing, truncated or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = read_metadata(folder)
        self._tensors: dict[str, TensorInfo] = {}
        self._chunks: dict[str, list[TensorChunk]] = {}
        for name, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self._tensors[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
                self._chunks[name] = [self._locate_chunk(name, chunk, i) for i, chunk in enumerate(entry.chunks)]
        self._check_files()

    @property
    def values(self) -> list[str]:
        """Names of what is not a tensor."""
        stored = self._metadata.state_dict_metadata.items()
        return [name for name, entry in stored if isinstance(entry, BytesStorageMetadata)]

    def read_value(self, name: str) -> Any:
        """What is stored under a name of `values`: numbers, texts, lists and dicts of these.

        Raises:
            PrimusError: It is damaged, or holds something else.
        """
        stored = self._metadata.storage_data[MetadataIndex(name)]
        place = TensorChunk((), (), self.folder / stored.relative_path, stored.offset, stored.length)
        return _load_saved(place)

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        shape = self._tensors[name].shape
        if not shape:
            return self.read_box(name, (), ())
        start, stop = get_bounds(rows, shape[0])
        return self.read_box(name, (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))

    def read_box(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """A box of a tensor.

        Raises:
            PrimusError: No file has a part of it.
        """
        dtype = self._tensors[name].dtype
        result: Tensor | None = None
        filled = 0
        for chunk in self._chunks[name]:
            box = _intersect(chunk, offsets, sizes)
            if box is None:
                continue
            part = _read_chunk_box(chunk, dtype, [a - b for a, b in zip(box[0], chunk.offsets, strict=True)], box[1])
            if box[1] == sizes:
                return part
            if result is None:
                result = torch.empty(sizes, dtype=dtype)
            target = result
            for axis, (first, size) in enumerate(zip(box[0], box[1], strict=True)):
                target = target.narrow(axis, first - offsets[axis], size)
            target.copy_(part)
            filled += math.prod(box[1])
        if filled != math.prod(sizes):
            raise PrimusError(f"{self.folder}: no file has all of {name}", "it was saved incompletely")
        return torch.empty(sizes, dtype=dtype) if result is None else result

    def _locate_chunk(self, name: str, chunk: ChunkStorageMetadata, number: int) -> TensorChunk:
        stored = self._metadata.storage_data.get(MetadataIndex(name, chunk.offsets, number))
        if stored is None:
            raise PrimusError(f"{self.folder}: {METADATA_NAME} does not say where {name} is")
        file = self.folder / stored.relative_path
        return TensorChunk(tuple(chunk.offsets), tuple(chunk.sizes), file, stored.offset, stored.length)

    def _check_files(self) -> None:
        """Every file is there, and as long as the metadata says."""
        ends: dict[Path, int] = {}
        for chunks in self._chunks.values():
            for chunk in chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        for file, end in ends.items():
            if not file.is_file():
                raise PrimusError(f"{file}: missing", "copy the checkpoint again from its source")
            if file.stat().st_size < end:
                raise PrimusError(
                    f"{file}: truncated: {file.stat().st_size} of {end} bytes",
                    "copy the checkpoint again from its source",
                )


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a folder, from a pickle that may name value classes only.

    Raises:
        PrimusError: It is missing or damaged, or names something else.
    """
    path = folder / METADATA_NAME
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise PrimusError(f"{path}: damaged, or not written by torch.distributed.checkpoint: {error}") from None
    if not isinstance(found, Metadata) or found.storage_data is None:
        raise PrimusError(f"{path}: not the metadata of torch.distributed.checkpoint")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses everything but classes that hold values, so that nothing is run."""

    def find_class(self, module: str, name: str) -> Any:
        if SAFE_NAMES.get(name) == module.removesuffix("._local"):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _get_member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _get_member(kind: object, name: object) -> Enum:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute of its class."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[str(name)]
    raise pickle.UnpicklingError("it names builtins.getattr")


def _intersect(
    chunk: TensorChunk, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of the part of a box that a chunk has."""
    starts, widths = [], []
    for first, count, wanted, width in zip(chunk.offsets, chunk.sizes, offsets, sizes, strict=True):
        start, end = max(first, wanted), min(first + count, wanted + width)
        if start >= end:
            return None
        starts.append(start)
        widths.append(end - start)
    return tuple(starts), tuple(widths)


def _read_chunk_box(chunk: TensorChunk, dtype: torch.dtype, offsets: Sequence[int], sizes: tuple[int, ...]) -> Tensor:
    """A box of a chunk; reads the rows that it spans."""
    data = _find_elements(chunk, dtype)
    if data is None:
        whole = _load_chunk(chunk)
        for axis, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            whole = whole.narrow(axis, start, size)
        return whole
    # Leading axes of which the box has one index are skipped by an offset; the next one is read in rows.
    axis = next((axis for axis, size in enumerate(sizes) if size != 1), max(len(sizes) - 1, 0))
    row_elements = math.prod(chunk.sizes[axis + 1 :])
    index = 0
    for position in range(min(axis + 1, len(sizes))):
        index = index * chunk.sizes[position] + offsets[position]
    start = data + index * row_elements * dtype.itemsize
    if not sizes:
        return read_tensor(chunk.file, start, (), dtype)
    rows = read_tensor(chunk.file, start, (sizes[axis], *chunk.sizes[axis + 1 :]), dtype)
    for inner in range(axis + 1, len(sizes)):
        rows = rows.narrow(inner - axis, offsets[inner], sizes[inner])
    return rows.reshape(sizes)


def _find_elements(chunk: TensorChunk, dtype: torch.dtype) -> int | None:
    """The first byte of a chunk's elements in the file; None if it was not saved as one contiguous tensor."""
    try:
        with chunk.file.open("rb", buffering=0) as file, zipfile.ZipFile(_FileWindow(file, chunk)) as archive:
            entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
            num_bytes = math.prod(chunk.sizes) * dtype.itemsize
            if len(entries) != 1 or entries[0].compress_type or entries[0].file_size != num_bytes:
                return None
            file.seek(chunk.start + entries[0].header_offset)
            header = ZIP_LOCAL_HEADER.unpack(file.read(ZIP_LOCAL_HEADER.size))
            return chunk.start + entries[0].header_offset + ZIP_LOCAL_HEADER.size + header[-2] + header[-1]
    except (OSError, zipfile.BadZipFile, struct.error) as error:
        raise PrimusError(f"{chunk.file}: damaged at byte {chunk.start}: {error}") from None


def _load_chunk(chunk: TensorChunk) -> Tensor:
    loaded = _load_saved(chunk)
    assert isinstance(loaded, Tensor)
    return loaded


def _load_saved(chunk: TensorChunk) -> Any:
    """What `torch.save` wrote."""
    try:
        with chunk.file.open("rb") as file:
            file.seek(chunk.start)
            return torch.load(io.BytesIO(file.read(chunk.length)), map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        first = str(error).splitlines()[0]
        raise PrimusError(f"{chunk.file}: damaged at byte {chunk.start}: {first}") from None


class _FileWindow(io.RawIOBase):
    """A chunk of a file as a file, for zipfile."""

    def __init__(self, file: io.RawIOBase, chunk: TensorChunk) -> None:
        self._file, self._start, self._length, self._position = file, chunk.start, chunk.length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._length - self._position)
        if count <= 0:
            return 0
        self._file.seek(self._start + self._position)
        found = self._file.readinto(memoryview(buffer)[:count]) or 0
        self._position += found
        return found

"""Write folders of torch.distributed.checkpoint (DCP) without a process group; see `dcp`."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from primus.checkpoint.checksum import choose_algorithm, create_hash
from primus.checkpoint.formats.dcp import METADATA_NAME
from primus.checkpoint.formats.tensor_bytes import write_tensor
from primus.checkpoint.formats.torch_output import make_frame
from primus.checkpoint.output import OutputFile, split_bytes
from primus.checkpoint.weights import TensorInfo

FILE_BYTES = 4 << 30
"""Tensor data in one file: what a conversion that was interrupted writes again at most."""


class FileContent(TypedDict):
    """What a file's writer records."""

    places: list[list[int]]
    """Start and length of each entry."""
    checksum: str
    """Of the file."""


class ChunkSource(NamedTuple):
    """A chunk that will be written."""

    name: str
    """Of its tensor."""
    info: TensorInfo
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.info.dtype.itemsize


def plan_files(
    chunks: Iterable[ChunkSource], folder: str = "", values: Mapping[str, Any] | None = None
) -> list[OutputFile]:
    """Files of at most `FILE_BYTES`, in a folder of the checkpoint, that hold the chunks; they record where each is.

    Args:
        chunks: The tensors.
        folder: Ends with a slash, or is empty.
        values: What is not a tensor, by name; in a separate file.
    """
    groups: list[list[ChunkSource]] = [[]]
    size = 0
    for chunk in chunks:
        if groups[-1] and size + chunk.num_bytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.num_bytes
    files = [
        OutputFile(f"{folder}__0_{number}.distcp", sum(chunk.num_bytes for chunk in group), _ChunkWriter(group))
        for number, group in enumerate(groups)
    ]
    if values:
        files.append(OutputFile(f"{folder}__0_{len(files)}.distcp", 0, _ValueWriter(values)))
    return files


class _ChunkWriter:
    """Writes the chunks of one file."""

    def __init__(self, chunks: list[ChunkSource]) -> None:
        self.chunks = chunks

    def __call__(self, file: BinaryIO, report: Callable[[int], None]) -> FileContent:
        hashed, places = HashedOutput(file), []
        for chunk in self.chunks:
            start, tensor = hashed.tell(), chunk.read()
            assert tuple(tensor.shape) == chunk.sizes, f"{chunk.name}: {tuple(tensor.shape)} read"
            save_tensor(tensor.to(chunk.info.dtype), hashed)
            places.append([start, hashed.tell() - start])
            report(chunk.num_bytes)
        return {"places": places, "checksum": hashed.compute_checksum()}


class _ValueWriter:
    """Writes what is not a tensor."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __call__(self, file: BinaryIO, _: Callable[[int], None]) -> FileContent:
        hashed, places = HashedOutput(file), []
        for value in self.values.values():
            saved = io.BytesIO()
            torch.save(value, saved)
            places.append([hashed.tell(), hashed.write(saved.getbuffer())])
        return {"places": places, "checksum": hashed.compute_checksum()}


def save_tensor(tensor: Tensor, file: HashedOutput) -> None:
    """Write what `torch.save` writes.

    Raises:
        OSError: The file cannot be written.
    """
    frame = make_frame(tuple(tensor.shape), tensor.dtype)
    file.write(frame.head)
    write_tensor(file, tensor)  # type: ignore[arg-type]
    file.write(frame.tail)


class HashedOutput:
    """A file that is written from its start to its end, and hashes what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._position = file, create_hash(choose_algorithm()), 0

    def write(self, data: Any) -> int:
        for part in split_bytes(data):
            self._file.write(part)
            self._hash.update(part)  # which the processor's cache holds from the write
            self._position += len(part)
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._position

    def compute_checksum(self) -> str:
        """Of the whole content, by `checksum.choose_algorithm`."""
        return str(self._hash.hexdigest())


def write_metadata(folder: Path, files: Sequence[OutputFile], records: Mapping[str, FileContent]) -> None:
    """Write `.metadata` for the chunks of `files`, at the recorded places."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        name, places = Path(file.name).name, records[file.name]["places"]
        if isinstance(file.write, _ValueWriter):
            for key, (start, length) in zip(file.write.values, places, strict=True):
                state[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = _StorageInfo(name, start, length)
            continue
        assert isinstance(file.write, _ChunkWriter)
        for chunk, (start, length) in zip(file.write.chunks, places, strict=True):
            entry = state.setdefault(
                chunk.name,
                TensorStorageMetadata(TensorProperties(chunk.info.dtype), torch.Size(chunk.info.shape), []),
            )
            assert isinstance(entry, TensorStorageMetadata)
            index = MetadataIndex(chunk.name, torch.Size(chunk.offsets), len(entry.chunks))
            storage[index] = _StorageInfo(name, start, length)
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    # The path of each name in the tree of the model: all are at its top, and DCP keeps dots in names.
    planner = {name: (name,) for name in state}
    # Last of all files: a folder without it is not a checkpoint for DCP.
    (folder / METADATA_NAME).write_bytes(pickle.dumps(Metadata(state, planner, storage)))

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
from primus.checkpoint.formats.output import OutputFile, split_bytes
from primus.checkpoint.weights import TensorInfo

FILE_BYTES = 4 << 30
"""Tensor data in one file."""

SMALL_BYTES = 64 << 10
"""Data that is written together with what follows it."""


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
    """`torch.save` without checksums, which readers do not check.

    Raises:
        OSError: The file cannot be written.
    """
    # A view would be saved with the whole storage behind it.
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    has_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor.clone() if is_view or not tensor.is_contiguous() else tensor, file)  # type: ignore[arg-type]
    except RuntimeError:
        # torch reports a failed write as an internal error.
        if file.error is None:
            raise
        raise file.error from None
    finally:
        torch.serialization.set_crc32_options(has_checksums)


class HashedOutput:
    """A file that is written from its start to its end: hashes what is written, and keeps the error of a failure.

    Small parts are written together: `torch.save` writes some forty of them for one tensor.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._position = file, create_hash(choose_algorithm()), 0
        self._small = bytearray()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) <= SMALL_BYTES:
            self._small += view
        else:
            self.flush()
            self._write_through(view)
        self._position += len(view)
        return len(view)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        if self._small:
            self._write_through(self._small)
            self._small = bytearray()

    def _write_through(self, data: Any) -> None:
        for part in split_bytes(data):
            try:
                self._file.write(part)
            except OSError as error:
                self.error = error
                raise
            self._hash.update(part)  # which the processor's cache holds from the write

    def compute_checksum(self) -> str:
        """Of the whole content, by `checksum.choose_algorithm`; writes what is left."""
        self.flush()
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
    planner = {name: (name,) for name in state}
    (folder / METADATA_NAME).write_bytes(pickle.dumps(Metadata(state, planner, storage)))

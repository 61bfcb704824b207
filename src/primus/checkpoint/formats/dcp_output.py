"""Write folders of torch.distributed.checkpoint (DCP) without a process group; see `dcp`."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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

from primus.checkpoint.formats.dcp import METADATA_NAME
from primus.checkpoint.formats.output import OutputFile
from primus.checkpoint.weights import TensorInfo

FILE_BYTES = 4 << 30
"""Tensor data in one file."""


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
        values: What is not a tensor, by name; in a file of its own.
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

    def __call__(self, file: BinaryIO, report: Callable[[int], None]) -> list[list[int]]:
        places = []
        for chunk in self.chunks:
            start = file.tell()
            tensor = chunk.read()
            assert tuple(tensor.shape) == chunk.sizes, f"{chunk.name}: {tuple(tensor.shape)} read"
            save_tensor(tensor.to(chunk.info.dtype), file)
            places.append([start, file.tell() - start])
            report(chunk.num_bytes)
        return places


class _ValueWriter:
    """Writes what is not a tensor."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __call__(self, file: BinaryIO, _: Callable[[int], None]) -> list[list[int]]:
        places = []
        for value in self.values.values():
            saved = io.BytesIO()
            torch.save(value, saved)
            places.append([file.tell(), file.write(saved.getbuffer())])
        return places


def save_tensor(tensor: Tensor, file: BinaryIO) -> None:
    """`torch.save` without checksums, which readers do not check.

    Raises:
        OSError: The file cannot be written.
    """
    # A view would be saved with the whole storage behind it.
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    recorder = _ErrorRecorder(file)
    has_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor.clone() if is_view or not tensor.is_contiguous() else tensor, recorder)  # type: ignore[arg-type]
    except RuntimeError:
        # torch reports a failed write as an internal error.
        if recorder.error is None:
            raise
        raise recorder.error from None
    finally:
        torch.serialization.set_crc32_options(has_checksums)


class _ErrorRecorder:
    """A file that keeps the error of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def write_metadata(folder: Path, files: Sequence[OutputFile], places: Mapping[str, list[list[int]]]) -> None:
    """Write `.metadata` for the chunks of `files`, at the recorded places."""
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        name = Path(file.name).name
        if isinstance(file.write, _ValueWriter):
            for key, (start, length) in zip(file.write.values, places[file.name], strict=True):
                state[key] = BytesStorageMetadata()
                storage[MetadataIndex(key)] = _StorageInfo(name, start, length)
            continue
        assert isinstance(file.write, _ChunkWriter)
        for chunk, (start, length) in zip(file.write.chunks, places[file.name], strict=True):
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

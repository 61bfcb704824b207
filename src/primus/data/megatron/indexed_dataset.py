"""Token files of Megatron-LM: PREFIX.bin has the tokens of all sequences, PREFIX.idx their lengths and offsets.

Layout of the .idx, little endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py):
``MMIDIDX\\0\\0`` | u64 version 1 | u8 dtype code | u64 sequences N | u64 document borders D |
i32 length[N] in tokens | i64 pointer[N] in bytes | i64 border[D] in sequences | i8 mode[N] if multimodal
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from primus.data import atomic
from primus.errors import PrimusError, UsageError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
Tokens = NDArray[np.integer[Any]]
Buffer: TypeAlias = bytes | memoryview

HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""Token types by code (enum DType in indexed_dataset.py)."""

UINT16_VOCABULARY = 65500
"""Vocabularies below this size are stored in two bytes (DType.optimal_dtype in indexed_dataset.py)."""

COPY_BYTES = 1 << 20
"""Bytes copied at a time; a multiple of 8, so that no number is divided."""
AGAIN = "prepare the data again, or copy both files again"


def choose_smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Token type that Megatron chooses for a vocabulary."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


def bin_path(prefix: Path) -> Path:
    """File of the tokens."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """File of the index."""
    return prefix.with_name(prefix.name + ".idx")


class IndexedTokens:
    """The sequences of PREFIX.bin, memory-mapped: ``tokens[i]`` is a read-only array of one sequence.

    Opening takes constant time and memory: it checks the header and the sizes of both files. `block_lengths`
    checks a part of the index, and `primus.data.verify` all of it.

    Raises:
        UsageError: A file is missing, empty, truncated, longer than its index says, or not a Megatron index.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        header = _read_header(idx_path(prefix))
        _, _, code, self.num_sequences, num_borders = header
        self.dtype = np.dtype(CODES[code])
        self.num_documents = num_borders - 1
        with idx_path(prefix).open("rb") as file:
            self._mapped_index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # The arrays are views of the mapping: the kernel reads a page when it is first used.
        raw = np.frombuffer(self._mapped_index, np.uint8)
        ends = np.cumsum([HEADER.size, 4 * self.num_sequences, 8 * self.num_sequences, 8 * num_borders])
        self.lengths = raw[ends[0] : ends[1]].view("<i4")
        self.pointers = raw[ends[1] : ends[2]].view("<i8")
        self.borders = raw[ends[2] : ends[3]].view("<i8")
        self.num_tokens = _check_bin_size(self) // self.dtype.itemsize
        self.tokens = np.asarray(np.memmap(bin_path(prefix), dtype=self.dtype, mode="r"))

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> NDArray[Any]:
        if not 0 <= index < self.num_sequences:
            raise IndexError(index)
        start, length = int(self.pointers[index]) // self.dtype.itemsize, int(self.lengths[index])
        if length < 0 or start < 0 or start + length > self.num_tokens:
            raise _build_broken_error(self.prefix, f"sequence {index} lies outside the .bin")
        return self.tokens[start : start + length]

    def release_index(self) -> None:
        """Release the memory of index pages that have been read; call it while iterating over a large index."""
        if hasattr(mmap, "MADV_DONTNEED"):
            # Safe at any time: the pages belong to a file and are read again when they are needed.
            self._mapped_index.madvise(mmap.MADV_DONTNEED)

    def find_offset(self, index: int) -> int:
        """Offset of a sequence in the .bin, in tokens; `index` may be one past the last."""
        return int(self.pointers[index]) // self.dtype.itemsize if index < self.num_sequences else self.num_tokens

    def block_lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """Lengths [last - first] of consecutive sequences in tokens, checked against their pointers.

        Raises:
            PrimusError: The pointers contradict the lengths; reading would give wrong tokens without an error.
        """
        lengths = self.lengths[first:last].astype(np.int64)
        ends = np.append(self.pointers[first + 1 : last + 1], [self.num_tokens * self.dtype.itemsize])[: last - first]
        wrong = np.flatnonzero(self.pointers[first:last] + lengths * self.dtype.itemsize != ends)
        if len(wrong):
            raise _build_broken_error(
                self.prefix, f"sequence {first + int(wrong[0])} does not end where the next one begins"
            )
        return lengths


def _read_header(path: Path) -> tuple[bytes, int, int, int, int]:
    """Read the header of an index, and check it against the size of the file."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file", "give the prefix that both the .bin and the .idx have")
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if not raw.startswith(MAGIC[: len(raw)]) or not raw:
        raise UsageError(f"{path}: {'empty' if not raw else 'not a Megatron index'}", AGAIN)
    if len(raw) < HEADER.size:
        raise UsageError(f"{path}: truncated within its header ({size} bytes)", AGAIN)
    header = HEADER.unpack(raw)
    _, version, code, sequences, borders = header
    if version != VERSION:
        raise UsageError(f"{path}: version {version} of the index, not {VERSION}", AGAIN)
    if code not in CODES or not np.issubdtype(CODES[code], np.integer):
        raise UsageError(f"{path}: token type code {code} is not an integer type", AGAIN)
    expected = HEADER.size + 12 * sequences + 8 * borders
    if size not in (expected, expected + sequences):  # a multimodal index has one more byte per sequence
        what = "truncated" if size < expected else "too long"
        raise UsageError(f"{path}: {what}, {size} bytes instead of {expected} for {sequences} sequences", AGAIN)
    if sequences == 0 or borders < 1:
        raise UsageError(f"{path}: holds no sequences", "prepare the data from files that have text")
    return header


def _check_bin_size(index: IndexedTokens) -> int:
    path = bin_path(index.prefix)
    if not path.is_file():
        raise UsageError(f"{path}: no such file, while its .idx exists", AGAIN)
    size = path.stat().st_size
    expected = int(index.pointers[-1]) + int(index.lengths[-1]) * index.dtype.itemsize
    if size == 0:
        raise UsageError(f"{path}: empty", AGAIN)
    if size != expected:
        what = "truncated" if size < expected else "longer than its index says"
        raise UsageError(f"{path}: {what}, {size} bytes instead of {expected}", AGAIN)
    return size


def _build_broken_error(prefix: Path, problem: str) -> PrimusError:
    return PrimusError(f"{idx_path(prefix)}: corrupt, {problem}", AGAIN)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx in constant memory, under temporary names until `commit`.

    Calls in the ``with`` block: `add_batch` (or `add_tokens` and `add_sequences`) for each batch, `finish_files`, then
    `commit`. Leaving the block without `commit` deletes the temporary files: no incomplete file has a final name.

    Args:
        prefix: Path without extension, in a folder that exists.
        dtype: Type of the stored tokens; see `choose_smallest_dtype`.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self.checksums: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self._limit = int(np.iinfo(self.dtype).max)
        self._paths = {
            name: atomic.build_temporary_path(prefix.with_name(f"{prefix.name}.{name}"))
            for name in ("bin", "idx", "lengths", "borders")
        }
        self._files: dict[str, BinaryIO] = {}
        self._digests = {name: xxhash.xxh3_128() for name in ("bin", "idx")}

    def __enter__(self) -> IndexedWriter:
        for name, path in self._paths.items():
            self._files[name] = path.open("w+b")
        self._files["borders"].write(struct.pack("<q", 0))
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # on a full disk the buffer cannot be flushed; the file is deleted below
                file.close()
        for path in self._paths.values():
            path.unlink(missing_ok=True)

    def add_batch(self, tokens: Tokens, lengths: Tokens, ends_document: NDArray[np.bool_]) -> None:
        """Append sequences.

        Args:
            tokens: [sum of lengths] token ids of all sequences, concatenated.
            lengths: [n] tokens of each sequence.
            ends_document: [n] whether a sequence is the last of its document.
        """
        # The conversion below would wrap such ids around without an error.
        if len(tokens) and (tokens.min() < 0 or tokens.max() > self._limit):
            raise ValueError(f"token ids from {tokens.min()} to {tokens.max()} do not fit {self.dtype}")
        self.add_tokens(np.ascontiguousarray(tokens, dtype=self.dtype.newbyteorder("<")))
        self.add_sequences(lengths, ends_document)

    def add_tokens(self, tokens: Tokens) -> None:
        """Append tokens (contiguous, of the stored type); `add_sequences` appends the lengths of their sequences."""
        self._write_content("bin", tokens.data)
        self.num_tokens += len(tokens)

    def add_sequences(self, lengths: Tokens, ends_document: NDArray[np.bool_]) -> None:
        """Append sequences whose tokens `add_tokens` appends; see `add_batch`."""
        self._files["lengths"].write(np.ascontiguousarray(lengths, dtype="<i4").data)
        borders = self.num_sequences + 1 + np.flatnonzero(ends_document)
        self._files["borders"].write(borders.astype("<i8").data)
        self.num_sequences += len(lengths)
        self.num_documents += len(borders)

    def add_document(self, tokens: Tokens) -> None:
        """Append a document that is one sequence."""
        self.add_batch(tokens, np.array([len(tokens)]), np.array([True]))

    def finish_files(self) -> None:
        """Write the index and sync both files to disk, still under temporary names; renaming needs no space then."""
        self._write_index()
        for name in ("bin", "idx"):
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        self.checksums = {name: digest.hexdigest() for name, digest in self._digests.items()}
        self.sizes = {name: self._paths[name].stat().st_size for name in ("bin", "idx")}

    def commit(self) -> None:
        """Rename the files to their final names; an .idx never exists next to the .bin of another run."""
        if not self.checksums:
            self.finish_files()
        # Delete the old index before the .bin changes, and rename the new one last: a crash in between leaves a .bin
        # without an index, which readers reject.
        atomic.delete_file(idx_path(self.prefix))
        atomic.publish_file(self._paths["bin"], bin_path(self.prefix))
        atomic.publish_file(self._paths["idx"], idx_path(self.prefix))

    def _write_content(self, name: str, content: Buffer) -> None:
        self._digests[name].update(content)
        self._files[name].write(content)

    def _write_index(self) -> None:
        # The header has the number of sequences, and all lengths precede the pointers. Lengths and borders are
        # collected in temporary files, and the lengths are read twice: as they are, and as running sums.
        code = next(code for code, kind in CODES.items() if np.dtype(kind) == self.dtype)
        lengths, borders = self._files["lengths"], self._files["borders"]
        self._write_content("idx", HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
        for chunk in _read_chunks(lengths):
            self._write_content("idx", chunk)
        end = 0
        for chunk in _read_chunks(lengths):
            sizes = np.frombuffer(chunk, dtype="<i4").astype(np.int64) * self.dtype.itemsize
            self._write_content("idx", (end + np.cumsum(sizes) - sizes).astype("<i8").data)
            end += int(sizes.sum())
        for chunk in _read_chunks(borders):
            self._write_content("idx", chunk)


def _read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Read back the content of a temporary file from its beginning."""
    file.seek(0)
    while chunk := file.read(COPY_BYTES):
        yield chunk

"""Identity of a stream of tokens and of its documents, independent of files, batches and token types.

The stream is cut every `CHUNK_TOKENS` tokens, and the lengths of its documents every `CHUNK_DOCUMENTS`, counted from
the beginning of the whole stream. Any number of processes can therefore digest parts of it. The fingerprint is the
xxh3_128 of the digests of all chunks. xxh3 detects damage and mistakes; it does not protect against forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from primus.data.megatron.indexed_dataset import IndexedTokens
from primus.data.process_pool import process_pool

CHUNK_TOKENS = 1 << 18
"""Tokens in a chunk: 0.5 or 1 MB, which stays in a core's cache."""

CHUNK_DOCUMENTS = 1 << 16
"""Documents in a chunk of lengths."""

RANGE_TOKENS = 128 * CHUNK_TOKENS
"""Tokens that a process digests in one task: a multiple of a chunk, so that chunks do not cross tasks."""

MAX_PIECES = 256
"""Maximum number of parts with a separate checksum in the manifest, by which damage is located."""

PIECE_DIGITS = 16
"""Hexadecimal digits of the checksum of a piece (xxh3_64)."""

DIGEST_BYTES = 16
FORMAT = b"primus tokens 1"


class Fingerprint:
    """Computes the fingerprint of a stream of tokens that is appended in order, in batches of any size.

    `add_sequences` has the parameters of `IndexedWriter.add_batch`. Two streams have equal fingerprints if they have
    the same token ids and the same document borders; the division of documents into sequences does not matter.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_documents = 0
        self._tokens = ChunkDigests(CHUNK_TOKENS, compute_token_digest)
        self._documents = ChunkDigests(CHUNK_DOCUMENTS, compute_length_digest)
        self._unfinished = 0

    def add_sequences(self, tokens: NDArray[Any], lengths: NDArray[Any], ends_document: NDArray[np.bool_]) -> None:
        """Append sequences.

        Args:
            tokens: [sum of lengths] token ids of all sequences, concatenated.
            lengths: [n] tokens of each sequence.
            ends_document: [n] whether a sequence is the last of its document.
        """
        self.add_tokens(tokens)
        # The first document of a batch may have begun in an earlier batch, with `_unfinished` tokens.
        ends = np.cumsum(lengths, dtype=np.int64)[ends_document]
        self.add_documents(np.diff(ends, prepend=-self._unfinished))
        total = int(np.sum(lengths, dtype=np.int64))
        self._unfinished = total - int(ends[-1]) if len(ends) else self._unfinished + total

    def add_tokens(self, tokens: NDArray[Any]) -> None:
        """Append token ids [n]; `add_documents` appends the lengths of their documents."""
        self._tokens.add_values(tokens)
        self.num_tokens += len(tokens)

    def add_documents(self, lengths: NDArray[Any]) -> None:
        """Append lengths [n] of documents in tokens; `add_tokens` appends their tokens."""
        self._documents.add_values(lengths)
        self.num_documents += len(lengths)

    def compute_fingerprint(self) -> str:
        """Fingerprint of the tokens and documents so far.

        Raises:
            ValueError: The last sequence does not end its document.
        """
        if self._unfinished:
            raise ValueError("the last document has no end")
        return combine_digests(
            self.num_tokens, self.num_documents, self._tokens.compute_digests(), self._documents.compute_digests()
        )

    def compute_pieces(self) -> str:
        """Checksums of up to `MAX_PIECES` equal parts of the stream, to locate differences; see `compute_pieces`."""
        return compute_pieces(self._tokens.compute_digests())


class ChunkDigests:
    """Digests of the chunks of a stream of values.

    Args:
        size: Number of values in a chunk; the last chunk may have fewer.
        digest: Computes the digest of a chunk.
    """

    def __init__(self, size: int, digest: Callable[[NDArray[Any]], bytes]) -> None:
        self._size, self._digest = size, digest
        self._done = bytearray()
        self._held: list[NDArray[Any]] = []
        self._num_held = 0

    def add_values(self, values: NDArray[Any]) -> None:
        """Append values [n]."""
        # State: `_held` has less than a chunk, from the end of earlier calls. Whole chunks are digested without a copy.
        first = 0
        while first < len(values):
            part = values[first : first + self._size - self._num_held]
            first += len(part)
            if len(part) == self._size:
                self._done += self._digest(part)
                continue
            self._held.append(part.copy())  # the caller may reuse the memory
            self._num_held += len(part)
            if self._num_held == self._size:
                self._done += self._digest(np.concatenate(self._held))
                self._held, self._num_held = [], 0

    def compute_digests(self) -> bytes:
        """Concatenated digests of all chunks, including an incomplete last one; may be called at any time."""
        rest = self._digest(np.concatenate(self._held)) if self._held else b""
        return bytes(self._done) + rest


def compute_token_digest(chunk: NDArray[Any], largest: int | None = None) -> bytes:
    """Digest of token ids, converted to the narrowest of u16, i32 and i64 that holds them.

    Args:
        chunk: The token ids, of any integer type.
        largest: The largest id, if it is known and no id is negative.
    """
    kind: np.dtype[Any] = np.dtype("<u2")
    if chunk.dtype != np.uint16 and len(chunk):
        low, high = (0, largest) if largest is not None else (int(chunk.min()), int(chunk.max()))
        if low < 0 or high > np.iinfo(np.uint16).max:
            fits = np.iinfo(np.int32).min <= low and high <= np.iinfo(np.int32).max
            kind = np.dtype("<i4" if fits else "<i8")
    return xxhash.xxh3_128_digest(np.ascontiguousarray(chunk, dtype=kind).data)


def compute_length_digest(lengths: NDArray[Any]) -> bytes:
    """Digest of the lengths of documents."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(lengths, dtype="<i8").data)


def combine_digests(num_tokens: int, num_documents: int, token_digests: bytes, length_digests: bytes) -> str:
    """Fingerprint of a stream from the concatenated digests of its chunks."""
    digest = xxhash.xxh3_128(FORMAT + struct.pack("<QQ", num_tokens, num_documents))
    digest.update(token_digests)
    digest.update(length_digests)
    return f"xxh3:{digest.hexdigest()}"


def count_chunks_in_piece(num_chunks: int) -> int:
    """Chunks in each of at most `MAX_PIECES` equal parts: a power of two."""
    return 1 << max(0, -(-num_chunks // MAX_PIECES) - 1).bit_length()


def compute_pieces(token_digests: bytes, num_chunks: int | None = None) -> str:
    """Concatenated checksums of equal parts of a stream, `PIECE_DIGITS` hexadecimal digits each.

    Args:
        token_digests: Digests of the stream's chunks.
        num_chunks: Number of chunks of the stream to compare with, if it may differ.
    """
    num_chunks = len(token_digests) // DIGEST_BYTES if num_chunks is None else num_chunks
    size = DIGEST_BYTES * count_chunks_in_piece(num_chunks)
    parts = (token_digests[start : start + size] for start in range(0, len(token_digests), size))
    return "".join(xxhash.xxh3_64_hexdigest(part) for part in parts)


def fingerprint_prefixes(prefixes: Sequence[Path], workers: int = 1) -> str:
    """Fingerprint of the concatenated stream of several token files; equal to that of one file with all of them.

    Args:
        prefixes: Paths without extension, in order.
        workers: Number of processes that read.

    Raises:
        UsageError: A file is missing, or the header or the sizes of a pair are wrong; see `IndexedTokens`.
    """
    files = [IndexedTokens(prefix) for prefix in prefixes]
    total = sum(file.num_tokens for file in files)
    ranges = [TokenRange(start, start + RANGE_TOKENS, CHUNK_TOKENS) for start in range(0, total, RANGE_TOKENS)]
    if workers == 1 or len(ranges) == 1:
        digests = b"".join(_compute_range_digests(prefixes, each) for each in ranges)
    else:
        with process_pool(min(workers, len(ranges))) as pool:
            digests = b"".join(pool.map(_compute_range_digests, [prefixes] * len(ranges), ranges))
    documents = ChunkDigests(CHUNK_DOCUMENTS, compute_length_digest)
    for file in files:
        for lengths in read_document_lengths(file):
            documents.add_values(lengths)
    return combine_digests(total, sum(file.num_documents for file in files), digests, documents.compute_digests())


def compute_document_starts(
    pointers: NDArray[Any], borders: NDArray[Any], first: int, last: int, num_bytes: int
) -> NDArray[np.int64]:
    """First byte in the .bin of documents `first` to ``last - 1``; a border at the end gives the size of the .bin.

    Args:
        pointers: First byte of each sequence.
        borders: First sequence of each document, and the end.
        first: First document.
        last: One past the last.
        num_bytes: Size of the .bin.
    """
    sequences = np.array(borders[first:last])
    inside = sequences < len(pointers)
    starts = np.full(len(sequences), num_bytes, dtype=np.int64)
    starts[inside] = pointers[sequences[inside]]
    return starts


def compute_document_lengths(
    pointers: NDArray[Any], borders: NDArray[Any], num_bytes: int, width: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the number of tokens of each document, in arrays of up to `CHUNK_DOCUMENTS`; the index must be valid.

    Args:
        pointers: First byte of each sequence.
        borders: First sequence of each document, and the end.
        num_bytes: Size of the .bin.
        width: Bytes of a token.
    """
    for first in range(0, len(borders) - 1, CHUNK_DOCUMENTS):
        last = min(first + CHUNK_DOCUMENTS, len(borders) - 1)
        yield np.diff(compute_document_starts(pointers, borders, first, last + 1, num_bytes)) // width


def read_document_lengths(file: IndexedTokens) -> Iterator[NDArray[np.int64]]:
    """Yield the number of tokens of each document of a file in constant memory; see `compute_document_lengths`."""
    width = file.dtype.itemsize
    for lengths in compute_document_lengths(file.pointers, file.borders, file.num_tokens * width, width):
        yield lengths
        file.release_index()


class TokenRange(NamedTuple):
    """Range of tokens that a process digests in one task."""

    first: int
    last: int
    """One past the last."""
    chunk: int
    """Tokens in a chunk."""


def _compute_range_digests(prefixes: Sequence[Path], wanted: TokenRange) -> bytes:
    """Digests of the chunks of a range of the joined stream."""
    # Each task opens the files itself: memory maps cannot be sent to another process.
    files = [IndexedTokens(prefix) for prefix in prefixes]
    chunks = ChunkDigests(wanted.chunk, compute_token_digest)
    borders = [0, *accumulate(file.num_tokens for file in files)]
    for file, (first, last) in zip(files, pairwise(borders), strict=True):
        chunks.add_values(file.tokens[max(0, wanted.first - first) : max(0, min(last, wanted.last) - first)])
    return chunks.compute_digests()

"""Checks all of an .idx, also after an error: header, sizes, lengths, pointers and document borders."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus.data.megatron.fingerprint import (
    CHUNK_DOCUMENTS,
    ChunkDigests,
    compute_document_lengths,
    compute_document_starts,
    compute_length_digest,
)
from primus.data.megatron.indexed_dataset import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path
from primus.data.verify.findings import DamagePlace, TokenFileFinding, build_finding, build_missing_finding

BLOCK = 1 << 16
MAX_CLASSIFIED = 1000
"""Maximum wrong entries of one kind in memory; the others are only counted."""

VERSION_BYTE, CODE_BYTE, SEQUENCES_BYTE, BORDERS_BYTE = 9, 17, 18, 26
"""Offsets of fields in the header."""


@dataclass(frozen=True)
class TokenFileIndex:
    """An .idx whose arrays have the sizes in its header; their values may be wrong."""

    prefix: Path
    dtype: np.dtype[Any] | None
    """Type of the tokens; None if its code is not that of an integer type."""
    lengths: NDArray[Any]
    """[N] tokens of each sequence."""
    pointers: NDArray[Any]
    """[N] first byte of each sequence."""
    borders: NDArray[Any]
    """[documents + 1] first sequence of each document, and the end."""
    multimodal: bool
    """Whether the modes of the sequences follow."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences, N."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.borders) - 1

    @property
    def pointers_byte(self) -> int:
        """Offset of the pointers in the .idx."""
        return HEADER.size + 4 * self.num_sequences

    @property
    def borders_byte(self) -> int:
        """Offset of the document borders in the .idx."""
        return HEADER.size + 12 * self.num_sequences

    def with_dtype(self, dtype: np.dtype[Any]) -> TokenFileIndex:
        """A copy with another token type."""
        return replace(self, dtype=dtype)

    def compute_document_starts(self, first: int, last: int, num_bytes: int) -> NDArray[np.int64]:
        """First byte in the .bin of documents `first` to ``last - 1``; for document D, the end of the .bin."""
        return compute_document_starts(self.pointers, self.borders, first, last, num_bytes)

    def document_at(self, byte: int, num_bytes: int) -> int:
        """Document with this byte of the .bin; the index must be valid."""
        documents = range(self.num_documents)
        return (
            bisect_right(
                documents,
                byte,
                key=lambda document: int(self.compute_document_starts(document, document + 1, num_bytes)[0]),
            )
            - 1
        )


def open_index(prefix: Path) -> tuple[TokenFileIndex | None, list[TokenFileFinding]]:
    """The index of `prefix`, and findings about its header and size; None if its arrays cannot be located."""
    path = idx_path(prefix)
    if not path.is_file():
        return None, [build_missing_finding(path)]
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size:
        what = f"truncated within its header, {size} bytes" if raw else "empty"
        return None, [build_finding("size", path, what, DamagePlace(byte=size))]
    _, _, code, sequences, borders = HEADER.unpack(raw)
    findings = [*_check_header(path, raw), *_check_size(path, size, sequences, borders)]
    # The arrays are located by the numbers in the header. If the file is too short for them, no position is reliable.
    if size < _compute_size(sequences, borders) or not sequences or not borders:
        return None, findings
    # Mapped, because an index may be larger than memory.
    content = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    ends = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * borders])
    lengths, pointers, rows = (content[first:last] for first, last in pairwise(ends))
    dtype = np.dtype(CODES[code]).newbyteorder("<") if _is_whole(code) else None
    multimodal = size == _compute_size(sequences, borders) + sequences
    return TokenFileIndex(
        prefix, dtype, lengths.view("<i4"), pointers.view("<i8"), rows.view("<i8"), multimodal
    ), findings


def _is_whole(code: int) -> bool:
    return code in CODES and np.issubdtype(CODES[code], np.integer)


def _compute_size(sequences: int, borders: int) -> int:
    return HEADER.size + 12 * sequences + 8 * borders


def _check_header(path: Path, raw: bytes) -> list[TokenFileFinding]:
    magic, version, code, sequences, borders = HEADER.unpack(raw)
    findings = []
    if magic != MAGIC:
        findings.append(
            build_finding(
                "header", path, "does not begin with the magic bytes of a Megatron index", DamagePlace(byte=0)
            )
        )
    if version != VERSION:
        problem = f"format version {version:,}; expected {VERSION}"
        findings.append(build_finding("header", path, problem, DamagePlace(byte=VERSION_BYTE)))
    if not _is_whole(code):
        problem = f"type code {code} is not an integer type"
        findings.append(build_finding("header", path, problem, DamagePlace(byte=CODE_BYTE)))
    if not sequences or not borders:
        findings.append(build_finding("header", path, "holds no sequences", DamagePlace(byte=SEQUENCES_BYTE)))
    return findings


def _check_size(path: Path, size: int, sequences: int, borders: int) -> list[TokenFileFinding]:
    expected = _compute_size(sequences, borders)
    if size in (expected, expected + sequences):
        return []
    problem = f"{size:,} bytes; {sequences:,} sequences and {borders:,} document boundaries need {expected:,}"
    return [build_finding("size", path, problem, DamagePlace(byte=min(size, expected)))]


def check_lengths_and_pointers(index: TokenFileIndex, num_bytes: int) -> list[TokenFileFinding]:
    """Check that sequences begin at 0, each at the end of the one before, and end with the .bin.

    Args:
        index: The index; its token type is known.
        num_bytes: Size of the .bin.
    """
    path, count = idx_path(index.prefix), index.num_sequences
    wrong, negative = _DamagePlaces(), _DamagePlaces()
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        lengths = index.lengths[first:last].astype(np.int64)
        pointers = index.pointers[first : last + 1]
        if last == count:
            # The end of the .bin is the pointer after the last sequence.
            pointers = np.append(pointers, np.array([num_bytes]))
        negative.add_numbers(first + np.flatnonzero(lengths < 0))
        wrong.add_numbers(first + np.flatnonzero(pointers[:-1] + lengths * _find_width(index) != pointers[1:]))
    findings = []
    if negative.count:
        places = [DamagePlace(byte=HEADER.size + 4 * each, sequence=each) for each in negative.first]
        findings.append(build_finding("lengths", path, "negative lengths", *places, count=negative.count))
    if index.pointers[0]:
        place = DamagePlace(byte=index.pointers_byte, sequence=0)
        findings.append(
            build_finding("pointers", path, f"the first pointer is {int(index.pointers[0]):,}, not 0", place)
        )
    return findings + _find_contradictions(index, wrong, num_bytes)


class _DamagePlaces:
    """The first of many numbers, and the count of all."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.count = 0

    def add_numbers(self, numbers: NDArray[Any]) -> None:
        self.first += numbers[: MAX_CLASSIFIED - len(self.first)].tolist()
        self.count += len(numbers)


def _find_width(index: TokenFileIndex) -> int:
    assert index.dtype is not None
    return index.dtype.itemsize


def _find_contradictions(index: TokenFileIndex, wrong: _DamagePlaces, num_bytes: int) -> list[TokenFileFinding]:
    """Attribute contradictions between the end of a sequence and the start of the next.

    A wrong pointer contradicts two neighbors; a wrong length contradicts one.
    """
    path, last, found = idx_path(index.prefix), index.num_sequences - 1, set(wrong.first)
    more = wrong.count - len(wrong.first)
    # Two consecutive contradictions share a pointer, which is the wrong value; an isolated one is a wrong length.
    pointers = [each + 1 for each in wrong.first if each + 1 in found]
    lengths = [each for each in wrong.first if not found & {each - 1, each + 1} and each != last]
    findings = []
    if pointers:
        places = [DamagePlace(byte=index.pointers_byte + 8 * each, sequence=each) for each in pointers]
        problem = "pointers that differ from the end of the previous sequence"
        findings.append(build_finding("pointers", path, problem, *places, count=len(pointers) + more))
    if lengths and not (lengths == [0] and index.pointers[0]):
        places = [DamagePlace(byte=HEADER.size + 4 * each, sequence=each) for each in lengths]
        problem = "lengths that contradict the next pointer"
        findings.append(
            build_finding("lengths", path, problem, *places, count=len(lengths) + (0 if pointers else more))
        )
    if last in found and last - 1 not in found:
        end = int(index.pointers[last]) + int(index.lengths[last]) * _find_width(index)
        problem = f"{num_bytes:,} bytes, but the last sequence of the index ends at {end:,}"
        findings.append(
            build_finding("size", bin_path(index.prefix), problem, DamagePlace(byte=min(max(end, 0), num_bytes)))
        )
    return findings


def check_borders(index: TokenFileIndex) -> list[TokenFileFinding]:
    """Check that documents begin at sequence 0, end with the last sequence, and have at least one each."""
    path = idx_path(index.prefix)

    def at(border: int) -> DamagePlace:
        return DamagePlace(byte=index.borders_byte + 8 * border, document=border)

    findings = []
    if index.borders[0]:
        problem = f"the first document begins at sequence {int(index.borders[0]):,}, not 0"
        findings.append(build_finding("documents", path, problem, at(0)))
    if index.borders[-1] != index.num_sequences:
        problem = f"the last document ends at sequence {int(index.borders[-1]):,}, not {index.num_sequences:,}"
        findings.append(build_finding("documents", path, problem, at(index.num_documents)))
    wrong = _DamagePlaces()
    for first in range(0, index.num_documents, BLOCK):
        wrong.add_numbers(first + np.flatnonzero(np.diff(index.borders[first : first + BLOCK + 1]) <= 0))
    if wrong.count:
        places = [at(each + 1) for each in wrong.first]
        problem = "documents that do not begin after the previous one"
        findings.append(build_finding("documents", path, problem, *places, count=wrong.count))
    return findings


def compute_documents_digest(index: TokenFileIndex, num_bytes: int) -> bytes:
    """Digests of the documents' lengths; see `primus.data.megatron.fingerprint`."""
    chunks = ChunkDigests(CHUNK_DOCUMENTS, compute_length_digest)
    for lengths in compute_document_lengths(index.pointers, index.borders, num_bytes, _find_width(index)):
        chunks.add_values(lengths)
    return chunks.compute_digests()

"""Shuffle documents by an external sort: each shard is sorted by random keys, then the shards are merged.

The key of a document depends on the seed, its shard and its position in the shard. Shards depend only on the input, so
the order does not depend on the number of workers. Keys are independent random 64-bit numbers, so that all orders are
equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primus.data import atomic
from primus.data.megatron.indexed_dataset import Tokens
from primus.data.permutation import draw_random_words, mix_numbers
from primus.data.shards.shard_queue import ShardOutput, ShardQueue, ShardResult

SUFFIXES = ("bin", "lengths", "ends", "keys", "counts")
"""Files of a sorted shard. ``bin``: tokens. Per sequence, ``lengths``: int32 length, and ``ends``: whether it ends a
document. Per document, ``keys``: uint64 key, and ``counts``: int32 number of sequences."""

MERGED_TOKENS = 1 << 21
"""Approximate number of tokens that are reordered at a time; each needs about 30 bytes of memory."""

SHUFFLE_KEY = 0x53484646
"""Separates these random numbers from others of the same seed."""


class KeyedDocuments(NamedTuple):
    """Consecutive documents with their sort keys."""

    keys: NDArray[np.uint64]
    """[d] sort key of each document."""
    counts: NDArray[np.int64]
    """[d] sequences of each document."""
    lengths: NDArray[np.int64]
    """[n] tokens of each sequence."""
    tokens: Tokens
    """[sum of lengths] token ids."""


class ShuffledBatch(NamedTuple):
    """Documents in shuffled order, in the form of `primus.data.megatron.indexed_dataset.IndexedWriter.add_batch`."""

    tokens: Tokens
    lengths: NDArray[np.int64]
    ends_document: NDArray[np.bool_]


@contextmanager
def open_unsorted_files(output: ShardOutput) -> Iterator[list[BinaryIO]]:
    """Temporary files for the tokens, lengths and ends of a shard in input order; deleted after the block."""
    paths = [_build_unsorted_path(output, suffix) for suffix in SUFFIXES[:3]]
    try:
        files: list[BinaryIO] = [path.open("wb") for path in paths]
        try:
            yield files
        finally:
            for file in files:
                file.close()
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def sort_shard(output: ShardOutput, shard: int, seed: int, dtype: np.dtype[Any]) -> None:
    """Write the sorted files of a shard from its `open_unsorted_files`, which must be complete and flushed.

    Args:
        output: Output of the shard.
        shard: Index of the shard.
        seed: Seed of the order.
        dtype: Type of the tokens.
    """
    tokens, lengths, ends = (
        _map_file(_build_unsorted_path(output, suffix), kind)
        for suffix, kind in zip(SUFFIXES[:3], (dtype, "<i4", np.bool_), strict=True)
    )
    counts = np.diff(np.flatnonzero(ends), prepend=-1)
    keys = draw_random_words(len(counts), mix_numbers(seed, SHUFFLE_KEY, shard))
    order = np.argsort(keys, kind="stable")
    firsts, starts = np.cumsum(counts) - counts, np.cumsum(lengths, dtype=np.int64) - lengths
    sizes = np.add.reduceat(lengths, firsts, dtype=np.int64) if len(firsts) else np.empty(0, np.int64)
    with output.path("bin").open("wb") as sorted_tokens, output.path("lengths").open("wb") as sorted_lengths:
        # Tokens are read in random order, from memory that the kernel may drop: a part at a time is copied, so that a
        # shard may be larger than memory.
        for some in np.split(order, _find_cuts(sizes[order])):
            sequences = _expand_ranges(firsts[some], counts[some])
            sorted_tokens.write(tokens[_expand_ranges(starts[firsts[some]], sizes[some])].data)
            sorted_lengths.write(np.ascontiguousarray(lengths[sequences], "<i4").data)
    output.path("ends").write_bytes(_mark_ends(counts[order]).data)
    output.path("keys").write_bytes(np.ascontiguousarray(keys[order], "<u8").data)
    output.path("counts").write_bytes(np.ascontiguousarray(counts[order], "<i4").data)


def merge_sorted(queue: ShardQueue, results: Sequence[ShardResult], dtype: np.dtype[Any]) -> Iterator[ShuffledBatch]:
    """Merge the documents of sorted shards in the order of their keys.

    Args:
        queue: The shard queue.
        results: Results of the shards; their files have been verified.
        dtype: Type of the tokens.
    """
    # Keys are uniform, so equal ranges of keys hold about equal numbers of tokens. Each range is read from every shard
    # and sorted in memory: memory does not grow with the input.
    runs = [_SortedRun(queue, result, dtype) for result in results if result.counts.get("documents", 0)]
    ranges = max(1, sum(result.counts.get("tokens", 0) for result in results) // MERGED_TOKENS)
    for index in range(1, ranges + 1):
        end = (index << 64) // ranges - 1  # largest key of the range; that of the last range is 2**64 - 1
        parts = [run.take_until(end) for run in runs]
        together = KeyedDocuments(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        if len(together.keys):
            yield _reorder_documents(together)


class _SortedRun:
    """Reads a sorted shard from beginning to end. No file stays open: shards can outnumber the allowed open files."""

    def __init__(self, queue: ShardQueue, result: ShardResult, dtype: np.dtype[Any]) -> None:
        self._paths = {suffix: queue.result_file(result, suffix) for suffix in SUFFIXES}
        self._dtype = dtype
        self._document = self._sequence = self._token = 0

    def take_until(self, end: int) -> KeyedDocuments:
        """Next documents, up to and including those with the key `end`."""
        keys = _map_file(self._paths["keys"], "<u8")
        last = int(keys.searchsorted(np.uint64(end), side="right"))
        documents = slice(self._document, last)
        counts = self._read_part("counts", "<i4", documents.start, documents.stop).astype(np.int64)
        lengths = self._read_part("lengths", "<i4", self._sequence, self._sequence + int(counts.sum())).astype(np.int64)
        tokens = self._read_part("bin", self._dtype, self._token, self._token + int(lengths.sum()))
        self._document, self._sequence = last, self._sequence + len(lengths)
        self._token += len(tokens)
        return KeyedDocuments(np.array(keys[documents]), counts, lengths, tokens)

    def _read_part(self, suffix: str, dtype: Any, first: int, last: int) -> NDArray[Any]:
        kind = np.dtype(dtype)
        return np.fromfile(self._paths[suffix], kind, last - first, offset=first * kind.itemsize)


def _reorder_documents(documents: KeyedDocuments) -> ShuffledBatch:
    # A stable sort keeps documents with equal keys in the order of their shards, so the result is deterministic.
    order = np.argsort(documents.keys, kind="stable")
    counts = documents.counts
    firsts, starts = np.cumsum(counts) - counts, np.cumsum(documents.lengths) - documents.lengths
    sizes = np.add.reduceat(documents.lengths, firsts)
    tokens = documents.tokens[_expand_ranges(starts[firsts[order]], sizes[order])]
    return ShuffledBatch(
        tokens, documents.lengths[_expand_ranges(firsts[order], counts[order])], _mark_ends(counts[order])
    )


def _expand_ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenated index ranges: `sizes[i]` consecutive indices from `starts[i]` for each i."""
    ends = np.cumsum(sizes)
    places = np.repeat(starts - (ends - sizes), sizes)
    places += np.arange(len(places))
    return places


def _mark_ends(counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each sequence is the last of its document, given the sequences of each document."""
    ends = np.zeros(int(counts.sum()), np.bool_)
    ends[np.cumsum(counts) - 1] = True
    return ends


def _find_cuts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices at which to split documents into parts of about `MERGED_TOKENS` tokens."""
    return np.flatnonzero(np.diff(np.cumsum(sizes) // MERGED_TOKENS)) + 1


def _build_unsorted_path(output: ShardOutput, suffix: str) -> Path:
    return atomic.build_temporary_path(output.stem.with_name(f"{output.stem.name}.unsorted-{suffix}"))


def _map_file(path: Path, dtype: Any) -> NDArray[Any]:
    """Memory-mapped array of a file."""
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))

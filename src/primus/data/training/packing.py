"""Packs documents into samples of equal length: ``dataset[i]`` is a pure function of the data, the seed and `i`.

Blocks of documents are shuffled, and so are the documents in each block. They form one stream of tokens, which is cut
every S tokens. Samples are then shuffled within windows, so that reads stay close together. Blocks and windows are
bounded in tokens: for documents of any length, a block has few tokens and a window spans many blocks. Only the place of
each block is stored, so that opening a file is instant and memory stays small for any size.

Legend: S sequence length, N sequences (documents) of the split, T tokens of the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from primus.data.megatron.indexed_dataset import HEADER, IndexedTokens, idx_path
from primus.data.permutation import create_permutation, mix_numbers, permute_position
from primus.errors import PrimusError, UsageError

ORDER = 2
"""Version of the order of samples. It changes with the order, because a run must not resume in another order."""

BLOCK = 512
"""Maximum consecutive documents in a block. Their lengths are in memory while the block is read."""

BLOCK_TOKENS = 1 << 18
"""Tokens that complete a block of fewer documents, as many as in 512 documents of 500 tokens."""

WINDOW = 16384
"""Minimum samples of a window, which are shuffled together and read while their blocks are in memory."""

BLOCKS_OF_WINDOW = 256
"""Minimum blocks of a window on average, so that it mixes many places of the corpus."""

CACHED_BLOCKS = 2048
"""Maximum blocks in memory: 18 MB at 17 bytes a document."""

FEW_PIECES = 32
"""Below this number of documents in a run, copying one after the other is faster than gathering tokens by index."""

MAPPED_POINTERS = 1 << 20
"""Pointers of the index that are mapped at a time to measure blocks: 8 MB."""

BLOCK_ORDER, DOCUMENT_ORDER, WINDOW_ORDER, SAMPLE_ORDER = range(4)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a sample that come from one sequence of a token file."""

    prefix: Path
    """The token file."""
    sequence: int
    """Its number in the .idx."""
    first_token: int
    """First token of the piece within it."""
    tokens: int
    """Number of tokens."""


@dataclass(frozen=True)
class TokenFileProgress:
    """Progress in a token file."""

    prefix: Path
    """The token file."""
    samples: int
    """Samples taken."""
    epochs: float
    """Number of epochs over its tokens."""


class Dataset(Protocol):
    """An endless sequence of samples, `samples_per_epoch` in each epoch."""

    samples_per_epoch: int

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Tokens [S + 1] of a sample, for any ``index >= 0``."""

    def find_pieces(self, index: int) -> list[Piece]:
        """Where the S + 1 tokens of a sample come from, in their order; empty if they come from no file."""

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """Progress in each token file after the first `num_samples`."""


class Epoch(NamedTuple):
    """Order of the blocks in one epoch."""

    blocks: NDArray[np.int64]
    """Block at each position of the stream."""
    ends: NDArray[np.int64]
    """End of each block in the stream, in tokens."""


class PackingBlock(NamedTuple):
    """Order of the documents of a block in one epoch."""

    order: NDArray[np.int64]
    """Number of each document within the block, in order."""
    ends: NDArray[np.int64]
    """End of each document within the block, in tokens, in order."""
    shifts: NDArray[np.int64]
    """Difference between the place of a token in the .bin and its position in the block, for each document."""


class PackingWindow(NamedTuple):
    """Samples that are shuffled together."""

    first: int
    """First sample, in the order of the stream."""
    size: int
    key: int
    """Key of their order."""


class BlockRun(NamedTuple):
    """A part of a block that is read in one step."""

    layout: PackingBlock
    number: int
    """Number of the block."""
    start: int
    """First token of the part within the block."""
    stop: int
    """One past its last."""


class PackedDataset:
    """Samples of S + 1 tokens, packed from a range of the sequences of a token file.

    An epoch has every token once, except for a tail of fewer than S; each epoch has another order.

    Args:
        tokens: The token file.
        seq_length: S.
        seed: Seed of the order.
        sequences: The range of sequences; all when None.
        vocab_size: A sample with a token id at or above it is an error.
        cached_blocks: Maximum blocks in memory.

    Raises:
        UsageError: The range has fewer than S + 1 tokens.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        seq_length: int,
        seed: int = 0,
        sequences: range | None = None,
        vocab_size: int | None = None,
        cached_blocks: int = CACHED_BLOCKS,
    ) -> None:
        self.tokens, self.seq_length, self.seed = tokens, seq_length, seed
        sequences = range(len(tokens)) if sequences is None else sequences
        self.vocab_size = vocab_size
        # Memory that grows with the file: 16 bytes for each block here, and as many for each cached epoch.
        self._block_starts, self._block_sizes = _find_blocks(tokens, sequences)
        self.num_tokens = int(self._block_sizes.sum())
        # Samples overlap by one token: the last target of a sample is the first input of the next.
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise UsageError(
                f"{tokens.prefix}: {self.num_tokens} tokens in {len(sequences)} documents are fewer than"
                f" one sequence of {seq_length} + 1",
                "use more data, another split or a smaller seq_length",
            )
        self._count_window_samples = _count_window_samples(self.num_tokens, len(self._block_sizes), seq_length)
        self._num_windows = max(1, self.samples_per_epoch // self._count_window_samples)
        self._epoch = lru_cache(maxsize=2)(self._lay_out_epoch)
        # Samples are read nearly in order. The additional entries are for threads that read ahead across a border.
        self._window = lru_cache(maxsize=4)(self._lay_out_window)
        self._block = lru_cache(maxsize=cached_blocks)(self._lay_out_block)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        epoch, start = self._locate_sample(index)
        tokens = self._read_stream(epoch, start, self.seq_length + 1)
        # As unsigned numbers, negative ids are the largest: one pass checks both bounds.
        if self.vocab_size is not None and tokens.view(np.uint64).max() >= self.vocab_size:
            raise _build_vocabulary_error(self.tokens, tokens, self.vocab_size)
        return tokens

    def find_pieces(self, index: int) -> list[Piece]:
        """Where the S + 1 tokens of a sample come from, in their order."""
        epoch, start = self._locate_sample(index)
        return [
            piece for run in self._split_runs(epoch, start, self.seq_length + 1) for piece in self._list_pieces(run)
        ]

    def compute_progress(self, num_samples: int) -> list[TokenFileProgress]:
        """Progress in the token file after the first `num_samples`."""
        return [TokenFileProgress(self.tokens.prefix, num_samples, num_samples / self.samples_per_epoch)]

    def _locate_sample(self, index: int) -> tuple[int, int]:
        """Epoch of a sample, and its first position in the stream of the epoch."""
        if index < 0:
            raise IndexError(index)
        epoch, position = divmod(index, self.samples_per_epoch)
        # The last window also has the remainder, so that it may be up to twice as large.
        number = min(position // self._count_window_samples, self._num_windows - 1)
        inside = position - number * self._count_window_samples
        window = self._window(epoch, number)
        return epoch, (window.first + permute_position(inside, window.size, window.key)) * self.seq_length

    def _read_stream(self, epoch: int, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [count] of the stream of an epoch from `start`."""
        out = np.empty(count, dtype=np.int64)
        filled = 0
        for run in self._split_runs(epoch, start, count):
            _copy_run(self.tokens.tokens, run, out[filled : filled + run.stop - run.start])
            filled += run.stop - run.start
        return out

    def _split_runs(self, epoch: int, start: int, count: int) -> Iterator[BlockRun]:
        """Parts of blocks that have the `count` tokens from `start` of the stream of an epoch."""
        layout = self._epoch(epoch)
        # side="right" skips blocks that end at `start`, also those without tokens.
        position = int(layout.ends.searchsorted(start, side="right"))
        offset = start - (int(layout.ends[position - 1]) if position else 0)
        while count:
            number = int(layout.blocks[position])
            block = self._block(epoch, number)
            size = min(int(block.ends[-1]) - offset, count)
            if size:
                yield BlockRun(block, number, offset, offset + size)
            position, offset, count = position + 1, 0, count - size

    def _list_pieces(self, run: BlockRun) -> Iterator[Piece]:
        layout = run.layout
        first, last = layout.ends.searchsorted((run.start, run.stop - 1), side="right").tolist()
        for index in range(first, last + 1):
            document = int(self._block_starts[run.number]) + int(layout.order[index])
            start = max(run.start, int(layout.ends[index - 1]) if index else 0)
            count = min(run.stop, int(layout.ends[index])) - start
            if count:
                offset = start + int(layout.shifts[index]) - self.tokens.find_offset(document)
                yield Piece(self.tokens.prefix, document, offset, count)

    def _lay_out_epoch(self, epoch: int) -> Epoch:
        blocks = create_permutation(len(self._block_sizes), mix_numbers(self.seed, epoch, BLOCK_ORDER))
        return Epoch(blocks, np.cumsum(self._block_sizes[blocks]))

    def _lay_out_window(self, epoch: int, number: int) -> PackingWindow:
        """Window at a position of an epoch. The last one, with the remainder, stays last; the others are shuffled."""
        key = mix_numbers(self.seed, epoch)
        size = self._count_window_samples
        if number < self._num_windows - 1:
            # Every order has a key of seed, epoch and a constant, so that no two orders are correlated and none is
            # stored.
            number = permute_position(number, self._num_windows - 1, mix_numbers(key, WINDOW_ORDER))
        else:
            size = self.samples_per_epoch - number * self._count_window_samples
        return PackingWindow(number * self._count_window_samples, size, mix_numbers(key, SAMPLE_ORDER, number))

    def _lay_out_block(self, epoch: int, block: int) -> PackingBlock:
        first, last = self._block_starts[block : block + 2].tolist()
        lengths = self.tokens.block_lengths(first, last)
        # Lengths are in the order of the file, `ends` in the order of the stream. The difference of the starts is the
        # shift.
        starts = self.tokens.find_offset(first) + np.cumsum(lengths) - lengths
        order = create_permutation(len(lengths), mix_numbers(self.seed, epoch, DOCUMENT_ORDER, block))
        ends = np.cumsum(lengths[order])
        return PackingBlock(order, ends, starts[order] - (ends - lengths[order]))


def _copy_run(tokens: NDArray[Any], run: BlockRun, out: NDArray[np.int64]) -> None:
    """Fill `out` with the tokens of a run, by the faster way for its number of documents."""
    ends, shifts, start, stop = run.layout.ends, run.layout.shifts, run.start, run.stop
    first, last = ends.searchsorted((start, stop - 1), side="right").tolist()
    # Many short documents: one gather over an index of all tokens. Few long ones: one slice each.
    if last - first >= FEW_PIECES:
        borders = np.minimum(ends[first : last + 1], stop)
        places = np.repeat(shifts[first : last + 1], np.diff(borders, prepend=start))
        places += np.arange(start, stop)
        out[:] = tokens[places]
        return
    done = start
    stops = ends[first : last + 1].tolist()
    stops[-1] = stop  # the run ends within its last document
    for end, shift in zip(stops, shifts[first : last + 1].tolist(), strict=True):
        out[done - start : end - start] = tokens[done + shift : end + shift]
        done = end


def _count_window_samples(num_tokens: int, num_blocks: int, seq_length: int) -> int:
    """Samples of a window: `WINDOW`, or more if these come from fewer than `BLOCKS_OF_WINDOW` blocks."""
    return max(WINDOW, -(-BLOCKS_OF_WINDOW * num_tokens // (num_blocks * seq_length)))


def _find_blocks(tokens: IndexedTokens, sequences: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First sequence of each block of the range, followed by `last`; and the tokens of each block.

    One part of the index is mapped at a time, because every page that is read counts as memory of the process.
    """
    first, last = sequences.start, sequences.stop
    base = HEADER.size + 4 * tokens.num_sequences
    end = tokens.find_offset(last) * tokens.dtype.itemsize
    starts, places = [], []
    for start in range(first, last, MAPPED_POINTERS):
        # MAPPED_POINTERS is a multiple of BLOCK, so that the parts do not change where blocks begin.
        size = min(MAPPED_POINTERS, last - start)
        more = int(start + size < last)  # the pointer after them says where they end
        mapped = np.asarray(
            np.memmap(idx_path(tokens.prefix), "<i8", "r", offset=base + 8 * start, shape=(size + more,))
        )
        heads = _block_heads(mapped[:size], int(mapped[size]) if more else end, tokens.dtype.itemsize)
        starts.append(start + heads)
        places.append(mapped[heads])
        del mapped  # before the next part is mapped
    starts.append(np.array([last]))
    places.append(np.array([end]))
    sizes = np.diff(np.concatenate(places)) // tokens.dtype.itemsize
    if sizes.min(initial=0) < 0:
        raise PrimusError(f"{tokens.prefix}.idx: corrupt, its pointers are not in order", "prepare the data again")
    return np.concatenate(starts), sizes


def _block_heads(pointers: NDArray[np.int64], end: int, token_bytes: int) -> NDArray[np.int64]:
    """First sequence of each block, from the places of the sequences in the .bin.

    A block begins every `BLOCK` sequences. If these have more than `BLOCK_TOKENS`, a block also begins at the first
    sequence after each multiple of `BLOCK_TOKENS`.
    """
    groups = np.arange(0, len(pointers), BLOCK)
    sizes = np.diff(pointers[groups], append=end)
    # Additional cuts of each group of BLOCK sequences; 0 for documents of usual length, which return here.
    cuts = np.maximum(0, (sizes - 1) // (BLOCK_TOKENS * token_bytes))
    if not cuts.any():
        return groups
    numbers = np.arange(1, cuts.sum() + 1) - np.repeat(np.cumsum(cuts) - cuts, cuts)  # 1.. of each group
    targets = np.repeat(pointers[groups], cuts) + numbers * (BLOCK_TOKENS * token_bytes)
    begin, stop = np.repeat(groups, cuts), np.repeat(np.append(groups[1:], len(pointers)), cuts)
    found = _find_first_at_or_after(pointers, targets, begin, stop)
    # A document longer than BLOCK_TOKENS satisfies several targets; the union keeps its successor once.
    return np.union1d(groups, found[found < stop])


def _find_first_at_or_after(
    pointers: NDArray[np.int64], targets: NDArray[np.int64], begin: NDArray[np.int64], stop: NDArray[np.int64]
) -> NDArray[np.int64]:
    """First index from `begin` with a pointer of at least the target; `stop` if there is none before it.

    A binary search, because `np.searchsorted` copies the pointers, which are not aligned in the file.
    """
    low, high = begin.copy(), stop.copy()
    # A group has at most BLOCK sequences, so that this number of halvings finishes all searches, which run in parallel.
    for _ in range(BLOCK.bit_length()):
        middle = (low + high) // 2
        is_before = pointers[np.minimum(middle, len(pointers) - 1)] < targets
        open_ones = low < high
        low = np.where(open_ones & is_before, middle + 1, low)
        high = np.where(open_ones & ~is_before, middle, high)
    return low


def _build_vocabulary_error(tokens: IndexedTokens, sample: NDArray[np.int64], vocab_size: int) -> PrimusError:
    wrong = int(sample.min()) if sample.min() < 0 else int(sample.max())
    return PrimusError(
        f"{tokens.prefix}.bin: token id {wrong} is outside the model's vocabulary of {vocab_size}",
        "set vocab_size to the tokenizer's, or prepare the data with the model's tokenizer",
    )

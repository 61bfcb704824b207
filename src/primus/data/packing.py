"""Sequences of equal length from documents: ``dataset[i]`` is a pure function of the data, the seed and `i`.

Documents are ordered by a keyed permutation of blocks and a hash within each block, joined into one stream of tokens,
and cut every S tokens; samples are then taken in a second keyed order within windows, so that reads stay close
together. Nothing is stored but the length of each block, so that opening is instant and memory small whatever the size.

Legend: S sequence length, N sequences (documents) of the split, T their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from primus.data.indexed import IndexedTokens
from primus.data.permutation import mix, permutation, permute
from primus.errors import PrimusError, UsageError

BLOCK = 512
"""Consecutive documents that keep together in the stream; their lengths are in memory while they are read."""

WINDOW = 16384
"""Samples that are shuffled among each other, and read while their blocks are in memory."""

CACHED_BLOCKS = 256
PERIOD_BITS = 16
PERIOD = 1 << PERIOD_BITS
"""Samples after which the pattern of a blend repeats; a weight is kept to 1 / PERIOD."""

BLOCK_ORDER, DOCUMENT_ORDER, WINDOW_ORDER, SAMPLE_ORDER = range(4)


class Dataset(Protocol):
    """Samples without end; those of an epoch are `samples_per_epoch`."""

    samples_per_epoch: int

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Tokens [S + 1] of a sample, for any ``index >= 0``."""


@dataclass(frozen=True)
class Epoch:
    """Order of the blocks in one epoch."""

    blocks: NDArray[np.int64]
    """Block at each position of the stream."""
    ends: NDArray[np.int64]
    """Stream position, in tokens, at which each of them ends."""


@dataclass(frozen=True)
class Block:
    """Order of the documents of a block in one epoch."""

    ends: NDArray[np.int64]
    """Position within the block, in tokens, at which each document ends, in order."""
    shifts: NDArray[np.int64]
    """What to add to a position within each document to have the token's place in the .bin."""


class PackedDataset:
    """Samples of S + 1 tokens, packed from a range of the sequences of a token file.

    Every token of an epoch is seen once, but for a tail of fewer than S; each epoch has another order.

    Args:
        tokens: The token file.
        seq_length: S.
        seed: Seed of the order.
        first: First sequence of the range.
        last: One past the last sequence of the range; all when None.
        vocab_size: A sample with a token id at or above it is an error.

    Raises:
        UsageError: The range has fewer than S + 1 tokens.
    """

    def __init__(
        self,
        tokens: IndexedTokens,
        seq_length: int,
        seed: int = 0,
        first: int = 0,
        last: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.tokens, self.seq_length, self.seed = tokens, seq_length, seed
        self.first, self.last = first, len(tokens) if last is None else last
        self.vocab_size = vocab_size
        self._block_sizes = _block_sizes(tokens, self.first, self.last)
        self.num_tokens = int(self._block_sizes.sum())
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise UsageError(
                f"{tokens.prefix}: {self.num_tokens} tokens in {self.last - self.first} documents are fewer than"
                f" one sequence of {seq_length} + 1",
                "use more data, another split or a smaller seq_length",
            )
        self._epoch = lru_cache(maxsize=2)(self._lay_out_epoch)
        self._block = lru_cache(maxsize=CACHED_BLOCKS)(self._lay_out_block)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if index < 0:
            raise IndexError(index)
        epoch, position = divmod(index, self.samples_per_epoch)
        sample = _in_window(position, self.samples_per_epoch, mix(self.seed, epoch))
        tokens = self._read(epoch, sample * self.seq_length, self.seq_length + 1)
        if self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            raise _outside_vocabulary(self.tokens, int(tokens.max()), self.vocab_size)
        return tokens

    def _read(self, epoch: int, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [count] of the stream of an epoch from `start`."""
        out = np.empty(count, dtype=np.int64)
        layout = self._epoch(epoch)
        position = int(np.searchsorted(layout.ends, start, side="right"))
        offset = start - (int(layout.ends[position - 1]) if position else 0)
        filled = 0
        while filled < count:
            filled += self._read_block(epoch, int(layout.blocks[position]), offset, out[filled:])
            position, offset = position + 1, 0
        return out

    def _read_block(self, epoch: int, block: int, offset: int, out: NDArray[np.int64]) -> int:
        """Fill `out` from a block, beginning `offset` tokens into it; returns how many there were."""
        layout = self._block(epoch, block)
        size = min(int(layout.ends[-1]) - offset, len(out))
        if size == 0:
            return 0
        first, last = np.searchsorted(layout.ends, [offset, offset + size - 1], side="right")
        ends = np.minimum(layout.ends[first : last + 1], offset + size)
        shifts = np.repeat(layout.shifts[first : last + 1], np.diff(ends, prepend=offset))
        out[:size] = self.tokens.tokens[np.arange(offset, offset + size) + shifts]
        return size

    def _lay_out_epoch(self, epoch: int) -> Epoch:
        blocks = permutation(len(self._block_sizes), mix(self.seed, epoch, BLOCK_ORDER))
        return Epoch(blocks, np.cumsum(self._block_sizes[blocks]))

    def _lay_out_block(self, epoch: int, block: int) -> Block:
        first = self.first + block * BLOCK
        lengths = self.tokens.block_lengths(first, min(first + BLOCK, self.last))
        starts = self.tokens.offset(first) + np.cumsum(lengths) - lengths
        order = permutation(len(lengths), mix(self.seed, epoch, DOCUMENT_ORDER, block))
        ends = np.cumsum(lengths[order])
        return Block(ends, starts[order] - (ends - lengths[order]))


class MockDataset:
    """Random tokens, a pure function of the seed and the sample's number."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int = 0) -> None:
        self.vocab_size, self.seq_length, self.seed = vocab_size, seq_length, seed
        self.samples_per_epoch = 1 << 62

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        random = np.random.Generator(np.random.Philox(key=mix(self.seed, index)))
        return random.integers(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)


class BlendedDataset:
    """Samples of several datasets in fixed proportions, spread evenly; each dataset is read in its own order.

    Args:
        datasets: What to blend.
        weights: Share of each, in any unit; every one positive.
    """

    def __init__(self, datasets: list[Dataset], weights: list[float]) -> None:
        self.datasets = datasets
        quotas = _quotas(weights)
        self._quotas = quotas
        self._owner, self._rank = _spread(quotas)
        self.samples_per_epoch = sum(dataset.samples_per_epoch for dataset in datasets)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        period, slot = divmod(index, PERIOD)
        owner = int(self._owner[slot])
        return self.datasets[owner][period * self._quotas[owner] + int(self._rank[slot])]


def inputs_and_targets(
    tokens_BS1: NDArray[np.int64], masked_input: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs [B, S] and targets [B, S] of a batch [B, S + 1]; a target of -100 is left out of the loss.

    Args:
        tokens_BS1: Samples of S + 1 tokens.
        masked_input: Token id after which nothing is to be predicted. The end-of-document token for `eod_mask_loss`,
            which in Megatron-LM masks the positions whose input is that token (`_get_ltor_masks_and_position_ids` in
            megatron/core/datasets/gpt_dataset.py): what follows belongs to an unrelated document.
    """
    inputs, targets = tokens_BS1[..., :-1], tokens_BS1[..., 1:]
    if masked_input is None:
        return inputs, targets
    return inputs, np.where(inputs == masked_input, -100, targets)


def _block_sizes(tokens: IndexedTokens, first: int, last: int) -> NDArray[np.int64]:
    """Tokens of each block of the range, read from one pointer a block."""
    starts = tokens.pointers[first:last:BLOCK] // tokens.dtype.itemsize
    sizes = np.diff(starts, append=tokens.offset(last)).astype(np.int64)
    if sizes.min(initial=0) < 0:
        raise PrimusError(f"{tokens.prefix}.idx: corrupt, its pointers are not in order", "prepare the data again")
    return sizes


def _in_window(position: int, size: int, key: int) -> int:
    """Sample at `position` of an epoch: whole windows are shuffled, then the samples within each; a rest comes last."""
    window, inside = divmod(position, WINDOW)
    whole = size // WINDOW
    if window == whole:
        return window * WINDOW + permute(inside, size - window * WINDOW, mix(key, SAMPLE_ORDER, window))
    window = permute(window, whole, mix(key, WINDOW_ORDER))
    return window * WINDOW + permute(inside, WINDOW, mix(key, SAMPLE_ORDER, window))


def _outside_vocabulary(tokens: IndexedTokens, token: int, vocab_size: int) -> PrimusError:
    return PrimusError(
        f"{tokens.prefix}.bin: token id {token} is outside the model's vocabulary of {vocab_size}",
        "set vocab_size to the tokenizer's, or prepare the data with the model's tokenizer",
    )


def _quotas(weights: list[float]) -> list[int]:
    """Slots of a period for each weight, by largest remainder."""
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: quotas[index] - exact[index])
    for index in by_remainder[: PERIOD - sum(quotas)]:
        quotas[index] += 1
    if min(quotas) < 1:
        raise UsageError(f"a share of less than 1 / {PERIOD} in a blend", "leave that dataset out or raise its weight")
    return quotas


def _spread(quotas: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Dataset of each slot of a period, and the slot's number among those of its dataset.

    Slots are taken in bit-reversed order (the van der Corput sequence), which keeps every stretch close to the shares.
    """
    slots: NDArray[Any] = np.arange(PERIOD)
    reversed_slots = np.zeros(PERIOD, dtype=np.int64)
    for bit in range(PERIOD_BITS):
        reversed_slots |= (slots >> bit & 1) << PERIOD_BITS - 1 - bit
    owner = np.searchsorted(np.cumsum(quotas), reversed_slots, side="right")
    rank = np.empty(PERIOD, dtype=np.int64)
    for index, quota in enumerate(quotas):
        rank[owner == index] = np.arange(quota)
    return owner, rank

"""The rule that removes repetitive texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import field

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.block import DocumentBlock, divide_or_zero
from primus.data.filter.cleaning.rules.rule import Rule

TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
DUPLICATE_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


class GopherRepetition(Rule, frozen=True, kw_only=True, tag="gopher_repetition"):
    """Removes repetitive texts: Rae et al. 2021 (arXiv 2112.11446), table A1."""

    max_duplicate_paragraphs: float | None = 0.30
    """Share of repeated paragraphs."""
    max_duplicate_paragraph_characters: float | None = 0.20
    max_duplicate_lines: float | None = 0.30
    max_duplicate_line_characters: float | None = 0.20
    max_top_ngram_characters: dict[int, float] = field(default_factory=lambda: dict(TOP_NGRAMS))
    """For each n, the share of characters in the most frequent n-gram of words."""
    max_duplicate_ngram_characters: dict[int, float] = field(default_factory=lambda: dict(DUPLICATE_NGRAMS))
    """For each n, the share of characters in repeated n-grams of words."""

    def start(self) -> None:
        """Build the table of characters."""
        characters.build_character_bits()

    def apply(self, block: DocumentBlock) -> None:
        """Remove by the counts of `repetition_kernels`."""
        from primus.data.filter.cleaning import repetition_kernels as kernels

        lengths = block.characters
        block.remove_documents(self.name, "empty", lengths == 0, lengths)
        counts = _count_pieces(block)
        for kind, what in ((kernels.PARAGRAPHS, "paragraph"), (kernels.LINES, "line")):
            share = divide_or_zero(counts[:, kind + kernels.DUPLICATES], counts[:, kind + kernels.PIECES])
            share_of_characters = divide_or_zero(counts[:, kind + kernels.DUPLICATE_CHARACTERS], lengths)
            for reason, values in (
                (f"max_duplicate_{what}s", share),
                (f"max_duplicate_{what}_characters", share_of_characters),
            ):
                block.remove_above(self.name, reason, values, getattr(self, reason))
        self._apply_ngrams(block)

    def _apply_ngrams(self, block: DocumentBlock) -> None:
        most, repeated = sorted(self.max_top_ngram_characters), sorted(self.max_duplicate_ngram_characters)
        limits: list[tuple[str, int, float]] = [
            *(("top", n, self.max_top_ngram_characters[n]) for n in most),
            *(("duplicate", n, self.max_duplicate_ngram_characters[n]) for n in repeated),
        ]
        if not limits or not block.alive.any():
            return
        counts = count_ngram_characters(block, most, repeated, [limit for _, _, limit in limits])
        for column, (what, n, limit) in enumerate(limits):
            values = divide_or_zero(counts[:, column], block.characters)
            block.remove_above(self.name, f"max_{what}_{n}gram_characters", values, limit)


def count_ngram_characters(
    block: DocumentBlock, most: list[int], repeated: list[int], limits: Sequence[float]
) -> np.ndarray:
    """Count characters in repeated n-grams of words.

    Args:
        block: The documents.
        most: Lengths n for which the most frequent n-gram counts.
        repeated: Lengths n for which all repeated n-grams count.
        limits: Shares of the characters, for each of `most` and of `repeated`. The counts of a document after the first
            one above its limit are 0.

    Returns:
        Counts, int64[D, len(most) + len(repeated)].
    """
    from primus.data.filter.cleaning import repetition_kernels as kernels

    found = block.words
    # One more than the words of the longest document: `sums` has a value before the first word.
    longest = int(block.num_words.max(initial=0)) + 1
    room = _find_table(2 * longest)
    counts = block.make_count_table(len(most) + len(repeated))
    allowed = np.outer(block.characters, limits) + 1  # 1 more: rounding must not end the count of a document early
    room.generation = kernels.count_ngram_characters(
        found.first, found.spans, found.hash, block.alive,
        np.array(most, np.int64), np.array(repeated, np.int64), allowed,
        np.empty(longest, np.uint64), np.empty(longest, np.int32), np.empty(longest, np.int32),
        room.table, np.uint64(room.generation), counts,
    )  # fmt: skip
    return counts


def count_repeated_line_characters(block: DocumentBlock) -> np.ndarray:
    """Characters of each document in repeated lines, without blank lines; int64[D]."""
    from primus.data.filter.cleaning import repetition_kernels as kernels

    repeated: np.ndarray = _run_kernel(kernels.count_lines, block, kernels.NUM_COUNTS)[
        :, kernels.LINES + kernels.DUPLICATE_CHARACTERS
    ]
    return repeated


def _count_pieces(block: DocumentBlock) -> np.ndarray:
    """Counts of `repetition_kernels.count_pieces`."""
    from primus.data.filter.cleaning import repetition_kernels as kernels

    return _run_kernel(kernels.count_pieces, block, 2 * kernels.NUM_COUNTS)


def _run_kernel(kernel: Callable[..., int], block: DocumentBlock, width: int) -> np.ndarray:
    """The counts of a kernel of `repetition_kernels`; int64[D, width]."""
    room = _find_table(int(block.characters.max(initial=0)))
    counts = block.make_count_table(width)
    texts = block.batch.codes, block.batch.offsets, block.alive, characters.build_character_bits()
    room.generation = kernel(*texts, room.table, np.uint64(room.generation), counts)
    return counts


class _RoomOfTable:
    """A reusable hash table. Each entry belongs to the generation that wrote it; entries of others are free."""

    def __init__(self, size: int) -> None:
        # The generation grows with each document and is never reset, so that entries of earlier blocks stay invalid.
        self.table = np.zeros((size, 4), np.uint64)
        self.generation: int = 0


_rooms: list[_RoomOfTable] = []
SMALLEST_ROOM = 1 << 14
LARGEST_KEPT = 1 << 20
"""Maximum rows of a table that is kept for the next block."""


def _find_table(size_needed: int) -> _RoomOfTable:
    """A table of at least this number of rows."""
    size = SMALLEST_ROOM
    while size < size_needed + 16:
        size *= 2
    if not _rooms or len(_rooms[0].table) < size:
        room = _RoomOfTable(size)
        if size > LARGEST_KEPT:
            return room
        _rooms[:] = [room]
    return _rooms[0]

"""The rule against texts that repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import field

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.block import DocumentBlock, divide_or_zero
from primus.data.filter.cleaning.rules.rule import Rule

TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
DUPLICATE_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


class GopherRepetition(Rule, frozen=True, kw_only=True, tag="gopher_repetition"):
    """Removes texts that repeat themselves: Rae et al. 2021 (arXiv 2112.11446), table A1."""

    max_duplicate_paragraphs: float | None = 0.30
    """Share of paragraphs that were there before."""
    max_duplicate_paragraph_characters: float | None = 0.20
    max_duplicate_lines: float | None = 0.30
    max_duplicate_line_characters: float | None = 0.20
    max_top_ngram_characters: dict[int, float] = field(default_factory=lambda: dict(TOP_NGRAMS))
    """For each n the share of characters in the most frequent run of n words."""
    max_duplicate_ngram_characters: dict[int, float] = field(default_factory=lambda: dict(DUPLICATE_NGRAMS))
    """For each n the share of characters in runs of n words that were there before."""

    def start(self) -> None:
        """Compile once."""
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
    """Characters in repeated runs of words.

    Args:
        block: The documents.
        most: Lengths n of which the most frequent run counts.
        repeated: Lengths n of which all repeated runs count.
        limits: Shares of the characters, for each of `most` and of `repeated`; behind the first count that exceeds its
            limit the document's are 0.

    Returns:
        Counts, int64[D, len(most) + len(repeated)].
    """
    from primus.data.filter.cleaning import repetition_kernels as kernels

    found = block.words
    longest = int(block.num_words.max(initial=0)) + 1
    room = _find_table(2 * longest)
    counts = block.make_count_table(len(most) + len(repeated))
    allowed = np.outer(block.characters, limits) + 1  # one more, so that rounding decides nothing
    room.generation = kernels.count_ngram_characters(
        found.first, found.spans, found.hash, block.alive,
        np.array(most, np.int64), np.array(repeated, np.int64), allowed,
        np.empty(longest, np.uint64), np.empty(longest, np.int32), np.empty(longest, np.int32),
        room.table, np.uint64(room.generation), counts,
    )  # fmt: skip
    return counts


def count_repeated_line_characters(block: DocumentBlock) -> np.ndarray:
    """Characters of each document in lines, blank ones aside, that were there before; int64[D]."""
    from primus.data.filter.cleaning import repetition_kernels as kernels

    room = _find_table(int(block.characters.max(initial=0)))
    counts = block.make_count_table(kernels.NUM_COUNTS)
    batch = block.batch
    room.generation = kernels.count_lines(
        batch.codes,
        batch.offsets,
        block.alive,
        characters.build_character_bits(),
        room.table,
        np.uint64(room.generation),
        counts,
    )
    repeated: np.ndarray = counts[:, kernels.LINES + kernels.DUPLICATE_CHARACTERS]
    return repeated


def _count_pieces(block: DocumentBlock) -> np.ndarray:
    """Counts of `repetition_kernels.pieces`."""
    from primus.data.filter.cleaning import repetition_kernels as kernels

    room = _find_table(int(block.characters.max(initial=0)))
    counts = block.make_count_table(2 * kernels.NUM_COUNTS)
    batch = block.batch
    room.generation = kernels.count_pieces(
        batch.codes,
        batch.offsets,
        block.alive,
        characters.build_character_bits(),
        room.table,
        np.uint64(room.generation),
        counts,
    )
    return counts


class _RoomOfTable:
    """A hash table that is used again and again; what is in it belongs to the generation that it was written in."""

    def __init__(self, size: int) -> None:
        self.table = np.zeros((size, 4), np.uint64)
        self.generation: int = 0


_rooms: list[_RoomOfTable] = []
SMALLEST_ROOM = 1 << 14
LARGEST_KEPT = 1 << 20
"""Rows of a table that stays for the next block; a larger one is for the document that needs it."""


def _find_table(size_needed: int) -> _RoomOfTable:
    """A table of at least so many rows."""
    size = SMALLEST_ROOM
    while size < size_needed + 16:
        size *= 2
    if not _rooms or len(_rooms[0].table) < size:
        room = _RoomOfTable(size)
        if size > LARGEST_KEPT:
            return room
        _rooms[:] = [room]
    return _rooms[0]

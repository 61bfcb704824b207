"""Rules that count words, marks and lines."""

from __future__ import annotations

import functools

import numpy as np

from primus.data.filter.cleaning import characters, words
from primus.data.filter.cleaning.block import DocumentBlock, divide_or_zero
from primus.data.filter.cleaning.rules.rule import Rule


class Length(Rule, frozen=True, kw_only=True, tag="length"):
    """Removes texts that are too short or too long.

    The defaults are those of tprimat's filter (prepare/filter.py).
    """

    min_characters: int | None = 100
    """Minimum number of code points."""
    min_words: int | None = 20
    """Minimum number of words, as defined by the recipe."""
    max_characters: int | None = None
    max_words: int | None = None

    def apply(self, block: DocumentBlock) -> None:
        """Remove by length."""
        block.remove_below(self.name, "min_characters", block.characters, self.min_characters)
        block.remove_above(self.name, "max_characters", block.characters, self.max_characters)
        if self.min_words is not None or self.max_words is not None:
            block.remove_below(self.name, "min_words", block.num_words, self.min_words)
            block.remove_above(self.name, "max_words", block.num_words, self.max_words)


class GopherQuality(Rule, frozen=True, kw_only=True, tag="gopher_quality"):
    """Removes texts unlike prose: Rae et al. 2021, "Scaling Language Models" (arXiv 2112.11446), A.1.1.

    As in datatrove, words of only symbols do not count for the number and length of words.
    """

    min_words: int | None = 50
    max_words: int | None = 100_000
    min_mean_word_length: float | None = 3
    max_mean_word_length: float | None = 10
    max_hashes_per_word: float | None = 0.1
    """Maximum number of # per word."""
    max_ellipses_per_word: float | None = 0.1
    """Maximum number of ... and its one-character form per word."""
    max_bullet_lines: float | None = 0.9
    """Share of lines that begin with a bullet or a hyphen."""
    max_ellipsis_lines: float | None = 0.3
    """Share of lines that end with an ellipsis."""
    min_alphabetic_words: float | None = 0.8
    """Share of words with a letter."""
    min_stop_words: int | None = 2
    """Minimum number of different `stop_words`."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")

    def start(self) -> None:
        """Build the table of characters, and hash the stop words."""
        characters.build_character_bits()
        _hash_words(self.stop_words)

    def apply(self, block: DocumentBlock) -> None:
        """Remove by the counts of `quality_kernels.count_gopher`."""
        from primus.data.filter.cleaning import quality_kernels as kernels

        counts = block.make_count_table(kernels.NUM_GOPHER)
        batch, found = block.batch, block.words
        kernels.count_gopher(
            batch.codes, batch.offsets, block.alive, characters.build_character_bits(),
            found.first, found.spans, found.hash, found.flags, _hash_words(self.stop_words),
            max(map(len, self.stop_words), default=0), counts,
        )  # fmt: skip
        num_words, lines = counts[:, kernels.WORDS], counts[:, kernels.LINES]
        real = counts[:, kernels.REAL_WORDS]
        length = divide_or_zero(counts[:, kernels.REAL_CHARACTERS], real)
        block.remove_below(self.name, "min_words", real, self.min_words)
        block.remove_above(self.name, "max_words", real, self.max_words)
        block.remove_below(self.name, "min_mean_word_length", length, self.min_mean_word_length)
        block.remove_above(self.name, "max_mean_word_length", length, self.max_mean_word_length)
        for column, reason in ((kernels.HASHES, "max_hashes_per_word"), (kernels.ELLIPSES, "max_ellipses_per_word")):
            block.remove_above(self.name, reason, divide_or_zero(counts[:, column], num_words), getattr(self, reason))
        for column, reason in (
            (kernels.BULLET_LINES, "max_bullet_lines"),
            (kernels.ELLIPSIS_LINES, "max_ellipsis_lines"),
        ):
            block.remove_above(self.name, reason, divide_or_zero(counts[:, column], lines), getattr(self, reason))
        alphabetic = divide_or_zero(counts[:, kernels.ALPHA_WORDS], num_words)
        block.remove_below(self.name, "min_alphabetic_words", alphabetic, self.min_alphabetic_words)
        block.remove_below(self.name, "min_stop_words", counts[:, kernels.STOP_WORDS], self.min_stop_words)


class FinewebQuality(Rule, frozen=True, kw_only=True, tag="fineweb_quality"):
    """Removes lists and pages of short or repeated lines: Penedo et al. 2024, "FineWeb" (arXiv 2406.17557).

    The thresholds are those of the code that made FineWeb (datatrove, fineweb_quality_filter); the paper gives 0.1 for
    `max_duplicate_line_characters`. Blank lines are ignored.
    """

    min_ended_lines: float | None = 0.12
    """Share of lines that end with terminal punctuation."""
    max_short_lines: float | None = 0.67
    """Share of lines of at most `short_line_characters`."""
    short_line_characters: int = 30
    max_duplicate_line_characters: float | None = 0.01
    """Share of characters in repeated lines."""
    max_newlines_per_word: float | None = 0.3

    def start(self) -> None:
        """Build the table of characters."""
        characters.build_character_bits()

    def apply(self, block: DocumentBlock) -> None:
        """Remove by the counts of `quality_kernels.count_fineweb` and repeated lines."""
        from primus.data.filter.cleaning import quality_kernels as kernels
        from primus.data.filter.cleaning.rules import repetition

        batch = block.batch
        counts = block.make_count_table(kernels.NUM_FINEWEB)
        bits = characters.build_character_bits()
        kernels.count_fineweb(batch.codes, batch.offsets, block.alive, bits, self.short_line_characters, counts)
        # The order of the tests decides which reason the report names; it is datatrove's.
        lines, newlines = counts[:, kernels.PROSE_LINES], counts[:, kernels.NEWLINES]
        block.remove_documents(self.name, "empty", lines == 0, lines)
        ended = divide_or_zero(counts[:, kernels.ENDED_LINES], lines)
        short = divide_or_zero(counts[:, kernels.SHORT_LINES], lines)
        block.remove_below(self.name, "min_ended_lines", ended, self.min_ended_lines)
        block.remove_above(self.name, "max_short_lines", short, self.max_short_lines)
        if self.max_duplicate_line_characters is not None:
            repeated = divide_or_zero(repetition.count_repeated_line_characters(block), block.characters - newlines)
            reason = "max_duplicate_line_characters"
            block.remove_above(self.name, reason, repeated, self.max_duplicate_line_characters)
        if self.max_newlines_per_word is not None:
            listed = divide_or_zero(newlines, block.num_words)
            block.remove_above(self.name, "max_newlines_per_word", listed, self.max_newlines_per_word)


class LongLines(Rule, frozen=True, kw_only=True, tag="mc4"):
    """Keeps texts with some long lines: Xue et al. 2021, "mT5" (arXiv 2010.11934), section 3.2."""

    min_long_lines: int | None = 3
    long_line_characters: int = 200
    """Minimum length of a long line."""

    def apply(self, block: DocumentBlock) -> None:
        """Remove by the number of long lines."""
        from primus.data.filter.cleaning import quality_kernels as kernels

        counts = np.zeros(len(block.texts), np.int64)
        batch = block.batch
        kernels.count_long_lines(batch.codes, batch.offsets, block.alive, self.long_line_characters, counts)
        block.remove_below(self.name, "min_long_lines", counts, self.min_long_lines)


@functools.cache
def _hash_words(stop_words: tuple[str, ...]) -> np.ndarray:
    """Hashes of words, uint64."""
    return words.split_words(words.pack_texts(stop_words), "whitespace").hash

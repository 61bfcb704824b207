"""The rule that keeps lines of prose, as in the Colossal Clean Crawled Corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.block import DocumentBlock
from primus.data.filter.cleaning.rules.rule import Rule
from primus.data.filter.cleaning.words import TextBatch

CITATIONS = ("[edit]", "[citation needed]")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
"""Phrases of TensorFlow Datasets' c4_utils.py, which made C4; the paper does not have them."""


class C4(Rule, frozen=True, kw_only=True, tag="c4"):
    """Drops lines that are not prose, then documents with little text left: Raffel et al. 2020 (arXiv 1910.10683).

    The defaults are the paper's, as in datatrove; the code that made C4 has `min_words_per_line` 5 and `min_sentences`
    3. Lists of bad words are a separate rule, and deduplication finds repeated sentences.
    """

    terminal_punctuation: bool = True
    """Drop lines that do not end with . ? ! or a quotation mark, or that end with three dots."""
    min_words_per_line: int | None = 3
    """Drop lines of fewer words between spaces."""
    max_word_length: int | None = 1000
    """Drop lines with a longer word."""
    min_sentences: int | None = 5
    """Remove documents with fewer sentences in the remaining lines."""
    remove_citations: bool = True
    """Remove [1], [edit] and [citation needed]."""
    javascript: bool = True
    """Drop lines that contain "javascript"."""
    policy: bool = True
    """Drop lines about cookies, terms of use and privacy."""
    lorem_ipsum: bool = True
    """Remove documents that contain "lorem ipsum"."""
    curly_bracket: bool = True
    """Remove documents that contain {, which are mostly code."""

    def start(self) -> None:
        """Build the table of characters."""
        characters.build_character_bits()

    def apply(self, block: DocumentBlock) -> None:
        """Drop lines, then remove documents."""
        from primus.data.filter.cleaning import c4_kernels as kernels

        batch, fates = self._drop_lines(block)
        for fate, what in (
            (kernels.TOO_LONG_WORD, "long_word"), (kernels.NO_ENDING, "no_terminal_punctuation"),
            (kernels.TOO_FEW_WORDS, "few_words"), (kernels.JAVASCRIPT, "javascript"), (kernels.POLICY, "policy"),
        ):  # fmt: skip
            block.count_edits(f"{self.name}.lines_dropped.{what}", int(fates[:, fate].sum()))
        for fate, reason in ((kernels.LOREM_IPSUM, "lorem_ipsum"), (kernels.CURLY_BRACKET, "curly_bracket")):
            block.remove_documents(self.name, reason, fates[:, fate] > 0, fates[:, fate])
        # The decoded texts and their arrays replace the old ones together, so that the next rule need not encode them
        # again.
        before = block.texts
        block.replace_texts(self.name, _decode_texts(batch, before, block.alive), batch)
        if self.min_sentences is not None:
            block.remove_below(self.name, "min_sentences", _count_sentences(block), self.min_sentences)

    def _drop_lines(self, block: DocumentBlock) -> tuple[TextBatch, np.ndarray]:
        """The remaining text of each document, and the number of its lines by result."""
        from primus.data.filter.cleaning import c4_kernels as kernels

        batch = block.batch
        fates = block.make_count_table(kernels.NUM_FATES)
        limits = [-1 if limit is None else limit for limit in (self.min_words_per_line, self.max_word_length)]
        phrases, letters = self._build_phrase_table()
        # Kept lines are never longer than in the input, so that one more code per document leaves room for newlines.
        written = np.empty(len(batch.codes) + len(batch.offsets), np.uint32)
        offsets = np.zeros_like(batch.offsets)
        count = kernels.drop_lines(
            batch.codes, batch.offsets, block.alive, characters.build_character_bits(), np.array(limits, np.int64),
            np.array([self.remove_citations, self.terminal_punctuation]),
            _pad_rows([[len(mark), *map(ord, mark)] for mark in CITATIONS]), phrases, letters, written, offsets, fates,
        )  # fmt: skip
        return TextBatch(written[:count], offsets), fates

    def _build_phrase_table(self) -> tuple[np.ndarray, np.ndarray]:
        """Phrases that drop a line or remove a document, in C4's order, and the table of their first characters."""
        from primus.data.filter.cleaning import c4_kernels as kernels

        wanted = (
            (self.lorem_ipsum, kernels.LOREM_IPSUM, ("lorem ipsum",)),
            (self.javascript, kernels.JAVASCRIPT, ("javascript",)),
            (self.curly_bracket, kernels.CURLY_BRACKET, ("{",)),
            (self.policy, kernels.POLICY, POLICY),
        )
        found = [(fate, phrase) for switch, fate, phrases in wanted if switch for phrase in phrases]
        letters = np.zeros((kernels.PLACES, kernels.OTHER + 1), np.int64)
        for row, (_, phrase) in enumerate(found):
            for place in range(kernels.PLACES):
                # A phrase shorter than the table accepts every character after its end.
                either = {phrase[place].lower(), phrase[place].upper()} if place < len(phrase) else None
                letters[place, [*map(ord, either)] if either else slice(None)] |= 1 << row
        return _pad_rows([[fate, len(phrase), *map(ord, phrase)] for fate, phrase in found]), letters


def _count_sentences(block: DocumentBlock) -> np.ndarray:
    from primus.data.filter.cleaning import quality_kernels

    counts = np.zeros(len(block.texts), np.int64)
    batch, found = block.batch, block.words
    quality_kernels.count_sentences(
        batch.codes, batch.offsets, block.alive, found.first, found.spans, found.flags, counts
    )
    return counts


def _decode_texts(batch: TextBatch, before: Sequence[str], alive: np.ndarray) -> list[str]:
    """The texts of a batch; a removed document keeps its original text for the report."""
    whole = batch.codes.astype("<u4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")
    borders = batch.offsets.tolist()
    return [
        whole[borders[document] : borders[document + 1]] if alive[document] else before[document]
        for document in range(len(before))
    ]


def _pad_rows(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Pad rows to one length, int64."""
    width = max(map(len, rows), default=2)
    return np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int64).reshape(len(rows), width)

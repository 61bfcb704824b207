"""A block of documents for the rules, so that each rule is a few loops over many documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct

from primus.data.filter.cleaning import words
from primus.data.filter.cleaning.words import TextBatch, WordBatch


class Removal(Struct, frozen=True, gc=False):
    """Why a document was removed."""

    document: int
    """Number of the document in the block."""
    rule: str
    """Name of the rule."""
    reason: str
    """Threshold of the rule that the document did not meet, or another finding."""
    value: float | str
    """Measured value."""
    limit: float | str | None
    """Limit in the recipe."""


@dataclass
class DocumentBlock:
    """Texts between two rules. A rule removes some documents and may change the texts of others."""

    texts: list[str]
    """Text of each document after the previous rules."""
    definition: str = "spacy-like"
    """Definition of a word."""
    fields: Sequence[Mapping[str, object] | None] = ()
    """Other fields of each record; may be empty."""
    alive: np.ndarray = field(init=False)
    """Documents that no rule has removed, bool[D]."""
    removals: list[Removal] = field(default_factory=list)
    """Reasons for the removal of the others."""
    edits: dict[str, int] = field(default_factory=dict)
    """Numbers of changes by rules, such as dropped lines, by ``RULE.WHAT``."""

    def __post_init__(self) -> None:
        self.alive = np.ones(len(self.texts), bool)

    @functools.cached_property
    def batch(self) -> TextBatch:
        """The texts as arrays for the kernels; those of removed documents may be empty."""
        # Documents keep their index: a removed one becomes an empty text, which costs the kernels nothing.
        return words.pack_texts([text if alive else "" for text, alive in zip(self.texts, self.alive, strict=True)])

    @functools.cached_property
    def words(self) -> WordBatch:
        """Words of the documents that are alive at the first access."""
        return words.split_words(self.batch, self.definition, self.alive)

    @functools.cached_property
    def characters(self) -> np.ndarray:
        """Length of each text, int64[D]."""
        return np.diff(self.batch.offsets)

    @functools.cached_property
    def num_words(self) -> np.ndarray:
        """Words of each text, int64[D]."""
        return np.diff(self.words.first)

    def make_count_table(self, columns: int) -> np.ndarray:
        """A table of zeros for the counts of a kernel, int64[D, columns]."""
        return np.zeros((len(self.texts), columns), np.int64)

    def remove_documents(
        self, rule: str, reason: str, bad: np.ndarray, values: np.ndarray, limit: float | None = None
    ) -> None:
        """Remove documents.

        Args:
            rule: Name of the rule.
            reason: Name of the threshold, or another finding.
            bad: Documents to remove, bool[D]; already removed ones keep their reason.
            values: Measured value of each document, [D].
            limit: Limit in the recipe.
        """
        # Only the first rule that a document fails is recorded: each removed document has one reason.
        found = (bad & self.alive).nonzero()[0]
        if not found.size:
            return
        for document, value in zip(found.tolist(), values[found].tolist(), strict=True):
            self.removals.append(Removal(document, rule, reason, value, limit))
        self.alive[found] = False

    def remove_where(
        self, rule: str, judge: Callable[[int], tuple[str, float | str, float | str | None] | None]
    ) -> None:
        """Remove the documents for which `judge` returns a reason, a value and a limit."""
        for document in np.flatnonzero(self.alive):
            if found := judge(int(document)):
                self.removals.append(Removal(int(document), rule, *found))
                self.alive[document] = False

    def remove_below(self, rule: str, reason: str, values: np.ndarray, limit: float | None) -> None:
        """Remove documents with a value below a limit; with None, remove nothing."""
        if limit is not None:
            self.remove_documents(rule, reason, values < limit, values, limit)

    def remove_above(self, rule: str, reason: str, values: np.ndarray, limit: float | None) -> None:
        """Remove documents with a value above a limit; with None, remove nothing."""
        if limit is not None:
            self.remove_documents(rule, reason, values > limit, values, limit)

    def replace_texts(self, rule: str, texts: list[str], batch: TextBatch | None = None) -> None:
        """Replace the texts of the documents.

        Args:
            rule: Name of the rule.
            texts: New text of each document.
            batch: The same texts as arrays, if already computed.
        """
        changed = sum(old is not new and old != new for old, new in zip(self.texts, texts, strict=True))
        self.count_edits(f"{rule}.changed_documents", changed)
        if not changed:
            return
        self.texts = texts
        # The cached properties depend on the texts. They are computed again on the next access.
        for name in ("batch", "characters", "words", "num_words"):
            self.__dict__.pop(name, None)
        if batch is not None:
            self.__dict__["batch"] = batch

    def count_edits(self, what: str, amount: int) -> None:
        """Add to the number of changes."""
        if amount:
            self.edits[what] = self.edits.get(what, 0) + amount


def divide_or_zero(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Quotients; 0 for a divisor of 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole != 0)

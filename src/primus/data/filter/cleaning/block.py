"""Documents that go through the rules together, so that each rule is a few loops over all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import Struct

from primus.data.filter.cleaning import words
from primus.data.filter.cleaning.words import TextBatch, WordBatch


class Removal(Struct, frozen=True, gc=False):
    """Why a document was removed."""

    document: int
    """Its number in the block."""
    rule: str
    """Name of the rule."""
    reason: str
    """The threshold of the rule that it did not meet, or what else was found."""
    value: float | str
    """What was measured."""
    limit: float | str | None
    """What the recipe asks for."""


@dataclass
class DocumentBlock:
    """Texts on their way through the rules; a rule removes some and may change others."""

    texts: list[str]
    """Text of each document, as the rules before have left it."""
    definition: str = "spacy-like"
    """What a word is."""
    fields: Sequence[dict[str, Any] | None] = ()
    """Other fields of each record; may be empty."""
    alive: np.ndarray = field(init=False)
    """Which documents no rule has removed, bool[D]."""
    removals: list[Removal] = field(default_factory=list)
    """Why the others were."""
    edits: dict[str, int] = field(default_factory=dict)
    """What rules changed, such as lines that they dropped: ``RULE.WHAT`` to a number."""

    def __post_init__(self) -> None:
        self.alive = np.ones(len(self.texts), bool)

    @functools.cached_property
    def batch(self) -> TextBatch:
        """The texts as the loops read them; those of removed documents may be empty."""
        return words.pack_texts([text if alive else "" for text, alive in zip(self.texts, self.alive, strict=True)])

    @functools.cached_property
    def words(self) -> WordBatch:
        """Words of the documents that are alive when a rule first asks for them."""
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
        """Room for what a loop counts of each document, int64[D, columns]."""
        return np.zeros((len(self.texts), columns), np.int64)

    def remove_documents(
        self, rule: str, reason: str, bad: np.ndarray, values: np.ndarray, limit: float | None = None
    ) -> None:
        """Remove documents.

        Args:
            rule: Name of the rule.
            reason: What was found.
            bad: Which ones, bool[D]; those that were removed before stay as they are.
            values: What was measured of each, [D].
            limit: What the recipe asks for.
        """
        found = (bad & self.alive).nonzero()[0]
        if not found.size:
            return
        for document, value in zip(found.tolist(), values[found].tolist(), strict=True):
            self.removals.append(Removal(document, rule, reason, value, limit))
        self.alive[found] = False

    def remove_where(
        self, rule: str, judge: Callable[[int], tuple[str, float | str, float | str | None] | None]
    ) -> None:
        """Remove the documents for whose number a function gives a reason, a value and a limit."""
        for document in np.flatnonzero(self.alive):
            if found := judge(int(document)):
                self.removals.append(Removal(int(document), rule, *found))
                self.alive[document] = False

    def remove_below(self, rule: str, reason: str, values: np.ndarray, limit: float | None) -> None:
        """Remove documents of which less than a limit was measured; None is no limit."""
        if limit is not None:
            self.remove_documents(rule, reason, values < limit, values, limit)

    def remove_above(self, rule: str, reason: str, values: np.ndarray, limit: float | None) -> None:
        """Remove documents of which more than a limit was measured; None is no limit."""
        if limit is not None:
            self.remove_documents(rule, reason, values > limit, values, limit)

    def replace_texts(self, rule: str, texts: list[str], batch: TextBatch | None = None) -> None:
        """Put other texts in the place of the present ones.

        Args:
            rule: Name of the rule.
            texts: Text of each document.
            batch: The same texts, if that is at hand.
        """
        changed = sum(old is not new and old != new for old, new in zip(self.texts, texts, strict=True))
        self.count_edits(f"{rule}.changed_documents", changed)
        if not changed:
            return
        self.texts = texts
        for name in ("batch", "characters", "words", "num_words"):
            self.__dict__.pop(name, None)
        if batch is not None:
            self.__dict__["batch"] = batch

    def count_edits(self, what: str, amount: int) -> None:
        """Add to what was changed."""
        if amount:
            self.edits[what] = self.edits.get(what, 0) + amount


def divide_or_zero(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Quotients, 0 where there is nothing to divide by."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole != 0)

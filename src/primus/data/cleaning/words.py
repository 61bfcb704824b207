"""Words of many texts at once, as flat arrays of positions and 64-bit hashes.

    batch = words.pack(texts)
    found = words.split(batch, "spacy-like")
    shingle = words.split(words.simplify(batch), "whitespace")

What a word is decides what the rules remove, so a recipe names its definition:

- ``spacy-like``: spaCy's rules for English. Runs without spaces, from which punctuation is divided: each mark is a
  word, ``...`` is one; ``don't`` is ``do`` and ``n't``, ``it's`` is ``it`` and ``'s``; addresses, ``1,000`` and
  ``e.g.`` are one.
- ``whitespace``: runs without spaces.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from primus.data.cleaning import characters, contractions
from primus.errors import UsageError, did_you_mean

DEFINITIONS = ("spacy-like", "whitespace")
CHARACTERS_PER_WORD = 3
"""Room that is made for words at first; more is made where there are more."""


@dataclass(frozen=True)
class Batch:
    """Texts one after another."""

    codes: np.ndarray
    """Code points, uint32[N]."""
    offsets: np.ndarray
    """Document d is ``codes[offsets[d] : offsets[d + 1]]``; int64[D + 1]."""

    @property
    def num_documents(self) -> int:
        """Number of texts."""
        return len(self.offsets) - 1

    def text(self, document: int) -> str:
        """A text as a string."""
        codes = self.codes[self.offsets[document] : self.offsets[document + 1]]
        return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


@dataclass(frozen=True)
class Words:
    """Words of a batch: those of document d are ``first[d] : first[d + 1]`` of the other arrays."""

    first: np.ndarray
    """int64[D + 1]."""
    start: np.ndarray
    """Position of the first character in the batch's codes, int64[W]."""
    end: np.ndarray
    """Position behind the last, int64[W]."""
    hash: np.ndarray
    """Hash of the characters, uint64[W]; the same on every machine and in every process."""
    flags: np.ndarray
    """`HAS_ALPHA` | `HAS_NO_SYMBOL` of `word_kernels`, uint8[W]."""


def pack(texts: Sequence[str]) -> Batch:
    """Texts as a batch."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return Batch(np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32), offsets)


def check_definition(definition: str) -> None:
    """Make sure that a definition exists.

    Raises:
        UsageError: It does not.
    """
    if definition not in DEFINITIONS:
        raise UsageError(
            f"words '{definition}'", did_you_mean(definition, DEFINITIONS) or f"valid: {', '.join(DEFINITIONS)}"
        )


def split(batch: Batch, definition: str) -> Words:
    """Words of each text of a batch.

    Args:
        batch: The texts.
        definition: One of `DEFINITIONS`.

    Raises:
        UsageError: There is no such definition.
    """
    check_definition(definition)
    from primus.data.cleaning import word_kernels

    function: Any = word_kernels.split_whitespace if definition == "whitespace" else word_kernels.split_spacy_like
    tables = () if definition == "whitespace" else _tables()
    capacity = len(batch.codes) // CHARACTERS_PER_WORD + 64
    while True:
        first = np.zeros(len(batch.offsets), np.int64)
        start, end = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
        hashes, flags = np.empty(capacity, np.uint64), np.empty(capacity, np.uint8)
        args = (batch.codes, batch.offsets, characters.classes(), *tables, first, start, end, hashes, flags)
        count = int(function(*args))
        if count <= capacity:
            return Words(first, start[:count], end[:count], hashes[:count], flags[:count])
        capacity = count


def simplify(batch: Batch) -> Batch:
    """Texts for comparing, as datatrove's simplify_text: small letters without accents, no punctuation, numbers as 0.

    Words are separated by one space. A mark that belongs to the character before it is dropped.
    """
    from primus.data.cleaning import simplify_kernels

    single, several = characters.simplified()
    codes = np.empty(len(batch.codes) * (several.shape[1] - 1), np.uint32)
    offsets = np.zeros_like(batch.offsets)
    count = simplify_kernels.simplify(batch.codes, batch.offsets, characters.classes(), single, several, codes, offsets)
    return Batch(codes[:count], offsets)


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Short forms as a hash table (keys, lengths of the run and of its parts), and units with their lengths."""
    from primus.data.cleaning import word_kernels

    divided = contractions.divided()
    size = 1 << (4 * len(divided)).bit_length()
    keys = np.zeros(size, np.uint64)
    parts = np.zeros((size, 1 + max(map(len, divided.values()))), np.int64)
    batch = pack(list(divided))
    for row, lengths in enumerate(divided.values()):
        with np.errstate(over="ignore"):
            value = word_kernels.word_hash(batch.codes, batch.offsets[row], batch.offsets[row + 1])
        slot = int(value) % size
        while keys[slot]:
            slot = (slot + 1) % size
        keys[slot] = value
        parts[slot, : 1 + len(lengths)] = [sum(lengths), *lengths]
    units = sorted(contractions.UNITS, key=len, reverse=True)
    table = np.zeros((len(units), len(units[0])), np.uint32)
    for row, unit in enumerate(units):
        table[row, : len(unit)] = [ord(character) for character in unit]
    return keys, parts, table, np.array([len(unit) for unit in units], np.int64)

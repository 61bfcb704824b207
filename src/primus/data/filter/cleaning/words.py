"""Splits many texts into words at once, as flat arrays of positions and 64-bit hashes.

    batch = words.pack_texts(texts)
    found = words.split_words(batch, "spacy-like")

The definition of a word affects which documents the rules remove, so a recipe names it:

- ``spacy-like``: spaCy's rules for English. Punctuation is split from runs without spaces. Each mark is a word, and
  ``...`` is one; ``don't`` is ``do`` and ``n't``, ``it's`` is ``it`` and ``'s``; addresses, ``1,000`` and ``e.g.``
  are one word.
- ``whitespace``: runs without spaces.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from primus.data.filter.cleaning import characters, contractions
from primus.errors import UsageError, did_you_mean

DEFINITIONS = ("spacy-like", "whitespace")
MAX_SUFFIXES = 1024
"""Maximum number of suffixes that are removed from a run."""

CHARACTERS_PER_WORD = 3
"""Characters for each word of the initial capacity; the capacity grows to the number of words if that is larger."""


@dataclass(frozen=True)
class TextBatch:
    """Concatenated texts."""

    codes: np.ndarray
    """Code points, uint32[N]."""
    offsets: np.ndarray
    """Document d is ``codes[offsets[d] : offsets[d + 1]]``; int64[D + 1]."""

    @property
    def num_documents(self) -> int:
        """Number of texts."""
        return len(self.offsets) - 1


@dataclass(frozen=True)
class WordBatch:
    """Words of a batch: those of document d are ``first[d] : first[d + 1]`` of the other arrays."""

    first: np.ndarray
    """int64[D + 1]."""
    spans: np.ndarray
    """First position of each word in the codes of the batch, and the one after its last, int32[W, 2]."""
    hash: np.ndarray
    """Hash of the characters, uint64[W]; the same on every machine and in every process."""
    flags: np.ndarray
    """`HAS_ALPHA` and others of `word_kernels`, uint8[W]."""


def pack_texts(texts: Sequence[str]) -> TextBatch:
    """Concatenate texts into a batch."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    codes = np.empty(offsets[-1], np.uint32)
    first = 0
    # Neighboring texts are encoded together. ASCII takes the short way: a quarter of the bytes to copy.
    for is_ascii, some in itertools.groupby(texts, str.isascii):
        text = "".join(some)
        last = first + len(text)
        if is_ascii:
            codes[first:last] = np.frombuffer(text.encode(), np.uint8)
        else:
            codes[first:last] = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        first = last
    return TextBatch(codes, offsets)


def check_definition(definition: str) -> None:
    """Check that a definition exists.

    Raises:
        UsageError: The definition is unknown.
    """
    if definition not in DEFINITIONS:
        raise UsageError(
            f"words '{definition}'", did_you_mean(definition, DEFINITIONS) or f"valid: {', '.join(DEFINITIONS)}"
        )


def split_words(batch: TextBatch, definition: str, wanted: np.ndarray | None = None) -> WordBatch:
    """Words of each text of a batch.

    Args:
        batch: The texts.
        definition: One of `DEFINITIONS`.
        wanted: Which texts to split, bool[D]; the others have no words. All texts when None.

    Raises:
        UsageError: The definition is unknown.
    """
    check_definition(definition)
    from primus.data.filter.cleaning import word_kernels

    wanted = np.ones(batch.num_documents, bool) if wanted is None else wanted
    first = np.zeros(len(batch.offsets), np.int64)
    given: tuple[np.ndarray, ...] = (batch.codes, batch.offsets, wanted, characters.build_character_bits())
    # The tables depend only on the definition and are cached; the stack is scratch memory of one call.
    kernel: Callable[..., int] = word_kernels.split_whitespace
    if definition == "spacy-like":
        kernel = word_kernels.split_spacy_like
        given = (*given, *_build_tables(), np.empty(MAX_SUFFIXES, np.int64))
    capacity = len(batch.codes) // CHARACTERS_PER_WORD + 64
    # The kernel counts words beyond the capacity, so that the second pass always has room.
    while True:
        spans = np.empty((capacity, 2), np.int32)
        hashes, flags = np.empty(capacity, np.uint64), np.empty(capacity, np.uint8)
        count = int(kernel(*given, first, spans, hashes, flags))
        if count <= capacity:
            return WordBatch(first, spans[:count], hashes[:count], flags[:count])
        capacity = count


@functools.cache
def _build_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Short forms, the sieve in front of them, and units, as arrays for `word_kernels.split_spacy_like`."""
    from primus.data.filter.cleaning.short_form_kernels import compute_sieve_slot
    from primus.data.filter.cleaning.word_hashes import hash_word

    divided = contractions.build_word_lengths()
    # A power of two from 8 to 16 times the entries: the kernels replace the modulo with a mask, and probing is short.
    size = 1 << (8 * len(divided)).bit_length()
    sieve, table = np.zeros(size, bool), np.zeros((size, 2), np.uint64)
    batch = pack_texts(list(divided))
    for row, (run, lengths) in enumerate(divided.items()):
        # Without numba, the hash is computed with NumPy scalars, which warn when they wrap around.
        with np.errstate(over="ignore"):
            value = int(hash_word(batch.codes, batch.offsets[row], batch.offsets[row + 1]))
        slot = value % size
        while table[slot, 0]:
            slot = (slot + 1) % size
        table[slot] = value, sum(length << 8 * part for part, length in enumerate(lengths))
        sieve[compute_sieve_slot(ord(run[0]), ord(run[-1]), len(run), sieve)] = True
    units = np.zeros((len(contractions.UNITS), 1 + max(map(len, contractions.UNITS))), np.uint32)
    for row, unit in enumerate(contractions.UNITS):
        units[row, : 1 + len(unit)] = [len(unit), *map(ord, unit)]
    return sieve, table, units

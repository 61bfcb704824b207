"""Words of texts as they are compared: without case, accents, punctuation and spacing, and any number as 0.

These are the hashes that ``words.split(words.simplify(batch), "whitespace")`` gives, in one pass with nothing else.
"""

from __future__ import annotations

import numpy as np

from primus.data.cleaning import characters
from primus.data.cleaning.compiled import entry
from primus.data.cleaning.simplify_kernels import _after_number
from primus.data.cleaning.word_kernels import FACTOR, HALF, MIX, SEED
from primus.data.cleaning.words import Batch

DEFINITION = "simplified, divided at spaces"
"""For the recipe: another definition of words gives other signatures."""

BLANKS = characters.SPACE | characters.BLANK
DECIMAL = characters.DECIMAL
NUM_CODES = characters.NUM_CODES
ZERO = np.uint64(ord("0"))
CHARACTERS_PER_WORD = 4


def word_hashes(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the words of each text.

    Returns:
        The hashes, uint64 of words; and where each text's begin, int64 of documents + 1.
    """
    single, several = characters.simplified()
    firsts = np.zeros_like(batch.offsets)
    capacity = len(batch.codes) // CHARACTERS_PER_WORD + 64
    while True:
        hashes = np.empty(capacity, np.uint64)
        count = int(_hash(batch.codes, batch.offsets, characters.classes(), single, several, firsts, hashes))
        if count <= capacity:
            return hashes[:count], firsts
        capacity = count


@entry
def _hash(
    codes: np.ndarray,
    offsets: np.ndarray,
    bits: np.ndarray,
    single: np.ndarray,
    several: np.ndarray,
    firsts: np.ndarray,
    hashes: np.ndarray,
) -> int:
    """Hash words; returns their number, which may be more than `hashes` holds."""
    count = 0
    for document in range(len(offsets) - 1):
        firsts[document] = count
        i, end = offsets[document], offsets[document + 1]
        value, empty = SEED, True
        while i <= end:
            if i == end or bits[codes[i]] & BLANKS:
                if not empty:
                    if count < len(hashes):
                        value = (value ^ (value >> HALF)) * MIX
                        hashes[count] = value ^ (value >> HALF)
                    count += 1
                    value, empty = SEED, True
                i += 1
                continue
            code = codes[i]
            if bits[code] & DECIMAL:
                i = _after_number(codes, bits, i, end)
                value, empty = (value ^ ZERO) * FACTOR, False
                continue
            i += 1
            becomes = single[code]
            if becomes < NUM_CODES:
                value, empty = (value ^ np.uint64(becomes)) * FACTOR, False
                continue
            row = becomes - NUM_CODES
            for part in range(1, several[row, 0] + 1):
                value, empty = (value ^ np.uint64(several[row, part])) * FACTOR, False
    firsts[len(offsets) - 1] = count
    return count

"""Hashes the normalized words of texts: without case, accents, punctuation and spacing, and any number as 0 by default.

As in datatrove's simplify_text, letters become lower-case and lose their accents, and punctuation is removed. The
hashes equal those of ``words.split_words(batch, "whitespace")`` of such texts; one pass over the UTF-8 computes them
and keeps no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_entry, compile_kernel
from primus.data.filter.cleaning.word_hashes import FACTOR, HALF, MIX, SEED

DEFINITION = "simplified, divided at spaces"
"""Part of the recipe: another definition of words gives other signatures."""

SEPARATORS = (ord("."), ord(","), 0x60C, 0x66B, 0x2396, 0x2397, 0x2398)
"""Separators between the digits of one number; at most one, so that 1.000,5 is two numbers."""

NUM_CODES = np.uint32(characters.NUM_CODES)
BLANK = np.uint32(0)
NUMBER = np.uint32(0xFFFFFFFF)
"""Entries of the table for characters that separate words, and for decimal digits."""

ZERO = np.uint64(ord("0"))
ASCII = np.uint32(0x80)
BYTES_PER_WORD = 4


def hash_words(texts: Sequence[bytes], normalize_numbers: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the words of each text.

    Args:
        texts: In UTF-8.
        normalize_numbers: Whether any number becomes 0, also within a word.

    Returns:
        The hashes, uint64 of words; and the first word of each text, int64 of documents + 1.
    """
    content = np.frombuffer(b"".join(texts), np.uint8)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    firsts = np.zeros_like(offsets)
    # The kernel counts words beyond the capacity, so that the second pass always has room.
    capacity = len(content) // BYTES_PER_WORD + 64
    while True:
        hashes = np.empty(capacity, np.uint64)
        count = int(_hash_words(content, offsets, *_build_code_tables(normalize_numbers), firsts, hashes))
        if count <= capacity:
            return hashes[:count], firsts
        capacity = count


@cache
def _build_code_tables(normalize_numbers: bool) -> tuple[np.ndarray, np.ndarray]:
    """Entry of each code point: a code, `BLANK`, `NUMBER`, or `NUM_CODES` + a row of the second table."""
    single, several = characters.build_simplified_codes()
    bits = characters.build_character_bits()
    becomes = single.copy()
    if normalize_numbers:
        # BLANK is 0, which no character becomes; NUMBER is above every row of the second table.
        becomes[bits & characters.DECIMAL != 0] = NUMBER
    becomes[bits & (characters.SPACE | characters.BLANK) != 0] = BLANK
    return becomes, several


@compile_kernel
def _decode_code_point(content: np.ndarray, position: int) -> tuple[np.uint32, int]:
    """The code point at a position of UTF-8, and the position after it."""
    # The texts are encoded by Python, so that the UTF-8 is valid and continuation bytes need no check.
    lead = np.uint32(content[position])
    if lead < ASCII:
        return lead, position + 1
    if lead < np.uint32(0xE0):
        return (lead & np.uint32(0x1F)) << np.uint32(6) | _decode_continuation(content, position + 1), position + 2
    middle = _decode_continuation(content, position + 1) << np.uint32(6)
    if lead < np.uint32(0xF0):
        return (lead & np.uint32(0x0F)) << np.uint32(12) | middle | _decode_continuation(
            content, position + 2
        ), position + 3
    middle = middle << np.uint32(6) | _decode_continuation(content, position + 2) << np.uint32(6)
    return (lead & np.uint32(0x07)) << np.uint32(18) | middle | _decode_continuation(
        content, position + 3
    ), position + 4


@compile_kernel
def _decode_continuation(content: np.ndarray, position: int) -> np.uint32:
    return np.uint32(content[position]) & np.uint32(0x3F)


@compile_kernel
def _skip_digits(content: np.ndarray, position: int, end: int, becomes: np.ndarray) -> int:
    """Position after the decimal digits that begin at `position`; `position` if there are none."""
    while position < end:
        code, after = _decode_code_point(content, position)
        if becomes[code] != NUMBER:
            return position
        position = after
    return position


@compile_kernel
def _skip_number(content: np.ndarray, position: int, end: int, becomes: np.ndarray) -> int:
    """Position after a number, which has at most one separator."""
    position = _skip_digits(content, position, end, becomes)
    if position < end:
        code, after = _decode_code_point(content, position)
        if code in SEPARATORS:
            behind = _skip_digits(content, after, end, becomes)
            if behind > after:
                return behind
    return position


@compile_entry
def _hash_words(
    content: np.ndarray,
    offsets: np.ndarray,
    becomes: np.ndarray,
    several: np.ndarray,
    firsts: np.ndarray,
    hashes: np.ndarray,
) -> int:
    """Hash words. Returns their number, which may exceed the capacity of `hashes`."""
    count = 0
    for document in range(len(offsets) - 1):
        firsts[document] = count
        position, end = offsets[document], offsets[document + 1]
        value, empty = SEED, True
        # One step past the end reads no byte and acts as a blank, which ends the last word.
        while position <= end:
            code, after, now = ASCII, position + 1, BLANK
            if position < end:
                code, after = _decode_code_point(content, position)
                now = becomes[code]
            if now == BLANK:
                if not empty:
                    # The steps of `word_hashes`: FNV-1a over the codes, mixed at the end of the word.
                    if count < len(hashes):
                        value = (value ^ (value >> HALF)) * MIX
                        hashes[count] = value ^ (value >> HALF)
                    count += 1
                    value, empty = SEED, True
            # NUMBER and the rows of `several` are NUM_CODES or more: one comparison separates the ordinary letters.
            elif now < NUM_CODES:
                value, empty = (value ^ np.uint64(now)) * FACTOR, False
            elif now == NUMBER:
                after = _skip_number(content, position, end, becomes)
                value, empty = (value ^ ZERO) * FACTOR, False
            else:
                row = now - NUM_CODES
                for part in range(1, several[row, 0] + 1):
                    value, empty = (value ^ np.uint64(several[row, part])) * FACTOR, False
            position = after
    firsts[len(offsets) - 1] = count
    return count

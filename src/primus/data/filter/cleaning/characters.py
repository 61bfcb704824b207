"""Tables over all of Unicode: properties of each character as bits, and its normalized form for comparison."""

from __future__ import annotations

import functools
import string
import unicodedata
from collections.abc import Iterable

import numpy as np

SPACE = 1
"""``str.isspace``."""
ALPHA = 2
"""``str.isalpha``."""
SYMBOL = 4
"""Punctuation and control characters as listed by datatrove. The quality rules ignore words of only these."""
LOWER = 8
"""A letter that is not upper-case."""
UPPER = 16
"""A letter that is not lower-case; letters without case have both bits."""
PREFIX = 32
"""A separate word at the beginning of a run of characters."""
SUFFIX = 64
"""A separate word at the end of a run of characters."""
QUOTE = 128
ICON = 256
"""Dingbats, emoji, arrows: a separate word at any position."""
DIGIT = 512
"""0 to 9."""
DECIMAL = 1024
"""A decimal digit of any script."""
BLANK = 2048
"""Becomes a space for comparison: punctuation of any script, ASCII symbols, control characters."""
MARK = 4096
"""A combining mark, which is removed for comparison."""
CURRENCY = 8192
TERMINAL = 16384
"""Ends a sentence, in any script: Unicode's property Sentence_Terminal."""

BREAK = 32768
"""Ends a line for ``str.splitlines``."""
PUNCTUATION_CATEGORY = 65536
"""Punctuation by its general category."""

FULL_STOP = 131072
"""The plain dot."""

NUM_CODES = 0x110000
ASSIGNED = ((0, 0x32400), (0xE0000, 0xE01F0))
"""Ranges with assigned characters; the rest of Unicode is unassigned or private."""

QUOTES = (
    "'\"\u201d\u201c`\u2018\u00b4\u2019\u201a\u201e\u00bb\u00ab"
    "\u300c\u300d\u300e\u300f\uff08\uff09\u3014\u3015\u3010\u3011\u300a\u300b\u3008\u3009\u27e6\u27e7"
)
PUNCTUATION = (
    "\u2026,:;!?\u00bf\u061f\u00a1()[]{}<>_#*&"
    "\u3002\uff1f\uff01\uff0c\u3001\uff1b\uff1a\uff5e\u00b7\u0964\u060c\u06d4\u061b\u066a"
)
"""Characters that a word neither begins nor ends with, as in spaCy's rules for English."""

MARKS = (
    "\u2014\u201d\uff1a\uff05\u3008\uff08\u3001\u2501\u3010\u300c\u300d\uff0c\u3011\uff1b\u201c\u300a\u201e\u2019\u2236\u00b4"
    "\uff0e\u2013\uff1f\uff01\uff5e\u00ab\u3009\uff09\u3002\u2026\u25ba\u00bb"
)
"""Punctuation beyond ASCII in datatrove's Gopher rules."""

TERMINALS = (
    ".!?\u203c\u203d\u2047\u2048\u2049\u2e2e\u2e3c\u3002\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61"
    "\u0589\u061d\u061e\u061f\u06d4\u0700\u0701\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965\u104a\u104b"
    "\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945\u2e53\u2e54\ua4ff\ua60e\ua60f\ua6f3\ua6f7"
)
"""Characters that end a sentence, in scripts that occur in text collections; a part of Unicode's Sentence_Terminal."""


@functools.cache
def build_character_bits() -> np.ndarray:
    """Bits of every code point, uint32."""
    bits = np.zeros(NUM_CODES, np.uint32)
    for first, last in ASSIGNED:
        bits[first:last] = [_classify_by_category(chr(code)) for code in range(first, last)]
    _add_bit(bits, string.digits, DIGIT)
    _add_bit(bits, string.punctuation, SYMBOL | BLANK)
    _add_bit(bits, MARKS + TERMINALS, SYMBOL)
    _add_bit(bits, QUOTES, QUOTE | PREFIX | SUFFIX)
    _add_bit(bits, PUNCTUATION, PREFIX | SUFFIX)
    _add_bit(bits, "\u2014\u2013", PREFIX | SUFFIX)
    _add_bit(bits, "\u00a7%=", PREFIX)
    _add_bit(bits, TERMINALS, TERMINAL)
    _add_bit(bits, ".", FULL_STOP)
    _add_bit(bits, "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029", BREAK)
    return bits


def _add_bit(bits: np.ndarray, characters: Iterable[str], bit: int) -> None:
    bits[[ord(character) for character in characters]] |= bit


_LETTER = {
    "Lu": ALPHA | UPPER,
    "Lt": ALPHA | UPPER,
    "Ll": ALPHA | LOWER,
    "Lm": ALPHA | LOWER,
    "Lo": ALPHA | UPPER | LOWER,
}
_OTHER = {"Nd": DECIMAL, "Mn": MARK, "So": ICON | PREFIX | SUFFIX, "Sc": CURRENCY | PREFIX, "Cc": SYMBOL | BLANK}


def _classify_by_category(character: str) -> int:
    """Bits that depend on the general category."""
    category = unicodedata.category(character)
    bits = _LETTER.get(category) or _OTHER.get(category) or (BLANK | PUNCTUATION_CATEGORY if category[0] == "P" else 0)
    return bits | SPACE if character.isspace() else bits


@functools.cache
def build_simplified_codes() -> tuple[np.ndarray, np.ndarray]:
    """Normalized characters for comparison: lower-case letters, without accents and other marks.

    Returns:
        For each code point the normalized code, or `NUM_CODES` + n if there are several codes (uint32); and a table of
        the latter (uint32), whose row n is a count and then the codes.
    """
    single = np.arange(NUM_CODES, dtype=np.uint32)
    rows: list[list[int]] = []
    for first, last in ASSIGNED:
        for code in range(first, last):
            character = chr(code)
            if (becomes := _simplify_character(character)) == character:
                continue
            codes = [ord(each) for each in becomes]
            single[code] = codes[0] if len(codes) == 1 else NUM_CODES + len(rows)
            if len(codes) != 1:
                rows.append([len(codes), *codes])
    width = max(map(len, rows))
    return single, np.array([row + [0] * (width - len(row)) for row in rows], np.uint32)


def _simplify_character(character: str) -> str:
    if character.isascii():
        return character.lower()
    parts = unicodedata.normalize("NFD", character.lower())
    return "".join(part for part in parts if unicodedata.category(part) != "Mn")

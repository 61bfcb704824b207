"""Kernels that find prefixes, suffixes and infixes: the parts at which a run of characters is split into words."""

from __future__ import annotations

from primus.data.filter.cleaning import characters
from primus.data.filter.cleaning.compiler import compile_kernel

ALPHA = characters.ALPHA
LOWER = characters.LOWER
UPPER = characters.UPPER
PREFIX = characters.PREFIX
SUFFIX = characters.SUFFIX
QUOTE = characters.QUOTE
ICON = characters.ICON
DIGIT = characters.DIGIT
CURRENCY = characters.CURRENCY

PLUS, COMMA, HYPHEN, DOT = ord("+"), ord(","), ord("-"), ord(".")
COLON, SLASH, CLOSING = ord(":"), ord("/"), ord(")")
APOSTROPHE, RIGHT_QUOTE = ord("'"), 0x2019
PERCENT, SQUARED, ELLIPSIS = ord("%"), 0xB2, 0x2026
LONG_DASH, SHORT_DASH = 0x2014, 0x2013
DASHES = (HYPHEN, LONG_DASH, SHORT_DASH, ord("~"))
OPERATORS = (PLUS, HYPHEN, ord("*"), ord("^"))
RELATIONS = (COLON, SLASH, ord("<"), ord(">"), ord("="))
SMALL_AND_CAPITAL_S = (ord("s"), ord("S"))


@compile_kernel
def measure_prefix(codes, bits, first, last):
    """Length of the prefix of a run of characters; 0 if there is none."""
    if first >= last:
        return 0
    code = codes[first]
    if bits[code] & PREFIX:
        return 1
    # Two or more dots are one word; a single dot stays with what follows, as in .5 or .com.
    if code == DOT:
        end = first + 1
        while end < last and codes[end] == DOT:
            end += 1
        return end - first if end - first > 1 else 0
    # Before a digit, + is the sign of the number.
    if code == PLUS and not (first + 1 < last and bits[codes[first + 1]] & DIGIT):
        return 1
    return 0


@compile_kernel
def measure_suffix(codes, bits, first, last, seen, units):
    """Length of the suffix of a run of characters; 0 if there is none. `seen` has the bits of all its characters."""
    if first >= last:
        return 0
    code = codes[last - 1]
    kind = bits[code]
    # The tests are in the order of their cost; the search for a unit is last and needs a digit anywhere in the run. The
    # two characters ): are one word.
    if kind & SUFFIX:
        return 2 if code == COLON and last - first > 1 and codes[last - 2] == CLOSING else 1
    if code == DOT:
        start = last - 1
        while start > first and codes[start - 1] == DOT:
            start -= 1
        if last - start > 1:
            return last - start
        return 1 if _does_dot_divide(codes, bits, first, last) else 0
    if last - first > 1 and code in SMALL_AND_CAPITAL_S:
        before = codes[last - 2]
        if before in (APOSTROPHE, RIGHT_QUOTE):
            return 2
    if last - first > 1 and bits[codes[last - 2]] & DIGIT and (code == PLUS or kind & CURRENCY):
        return 1
    return _measure_unit(codes, bits, first, last, units) if seen & DIGIT else 0


@compile_kernel
def _does_dot_divide(codes, bits, first, last):
    """Whether the dot at the end of a run of characters ends a sentence rather than an abbreviation."""
    if last - first < 2:
        return False
    before = codes[last - 2]
    kind = bits[before]
    if kind & (DIGIT | LOWER | SUFFIX) and not kind & ICON:
        return True
    if before in (PERCENT, SQUARED, HYPHEN, PLUS):
        return True
    # After one capital the dot belongs to an initial (J.), after two it ends a sentence (USA.).
    return bool(last - first > 2 and kind & UPPER and bits[codes[last - 3]] & UPPER)


@compile_kernel
def _measure_unit(codes, bits, first, last, units):
    """Length of a unit of measurement after a digit; each row of `units` is a length, then that many codes."""
    # A row holds a length and the codes, so that the longest unit has one code less than the row. The search stops
    # there, or at the digit that must precede the unit.
    start = last
    while start > first and last - start < units.shape[1] and not bits[codes[start - 1]] & DIGIT:
        start -= 1
    length = last - start
    if start == first or length == 0 or length >= units.shape[1]:
        return 0
    for row in range(len(units)):
        if units[row, 0] != length:
            continue
        same = True
        for i in range(length):
            if codes[start + i] != units[row, i + 1]:
                same = False
                break
        if same:
            return length
    return 0


@compile_kernel
def measure_infix(codes, bits, first, i, last):
    """Length of the infix at position `i` of a run of characters; 0 if there is none."""
    code = codes[i]
    kind = bits[code]
    # Most characters leave here. Below, only icons and ellipses split at the ends of a run; every other infix needs a
    # character on both sides.
    if kind & (ALPHA | DIGIT):
        return 0
    if kind & ICON or code == ELLIPSIS:
        return 1
    if code == DOT and i + 1 < last and codes[i + 1] == DOT:
        end = i + 2
        while end < last and codes[end] == DOT:
            end += 1
        return end - i
    if i == first or i + 1 >= last:
        return 0
    before, after = bits[codes[i - 1]], bits[codes[i + 1]]
    if code == DOT:
        return 1 if before & (LOWER | QUOTE) and after & (UPPER | QUOTE) else 0
    if code == COMMA:
        return 1 if before & ALPHA and after & ALPHA else 0
    if code in OPERATORS and before & DIGIT and (after & DIGIT or codes[i + 1] == HYPHEN):
        return 1
    if code in DASHES:
        return _measure_dash(codes, bits, i, last) if before & (ALPHA | DIGIT) else 0
    if code in RELATIONS:
        return 1 if before & (ALPHA | DIGIT) and after & ALPHA else 0
    return 0


@compile_kernel
def _measure_dash(codes, bits, first, last):
    """Length of a dash before a letter: up to three hyphens or two long dashes; 0 if no letter follows."""
    most = 3 if codes[first] == HYPHEN else (2 if codes[first] == LONG_DASH else 1)
    end = first + 1
    while end < last and end - first < most and codes[end] == codes[first]:
        end += 1
    return end - first if end < last and bits[codes[end]] & ALPHA else 0
